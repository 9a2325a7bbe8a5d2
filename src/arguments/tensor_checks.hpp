// Checks what every call asks of its tensors. Each refusal names the tensor, what is wanted, what
// was found, and what to do.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <utility>

#include "kernels/params.hpp"
#include "longspan/element.hpp"
#include "longspan/error.hpp"
#include "longspan/tensor.hpp"

namespace longspan {

/// The most of anything that kernels count in 32 bits: tokens, sequences, keys, pages.
inline constexpr std::int64_t kMostCount = std::numeric_limits<std::int32_t>::max();

template <class... Args>
void require(bool holds, fmt::format_string<Args...> format, Args&&... args) {
  if (!holds) throw InputError(fmt::format(format, std::forward<Args>(args)...));
}

/// Throws UsageError with the text `what` unless the options hold. They are checked once, so that
/// the text may be made ahead of the check.
inline void usage(bool holds, const std::string& what) {
  if (!holds) throw UsageError(what);
}

/// A tensor's shape in a message, which is made only where a check fails: a run makes dozens of
/// checks, and each text would take longer than all of them.
struct ShapeText {
  const Tensor& tensor;
};
inline ShapeText shape_text(const Tensor& t) { return {t}; }
std::string to_string(const ShapeText& shape);

/// A number that is wanted, or, below 0, what stands for any.
struct CountText {
  std::int64_t count;
  const char* any;
};
std::string to_string(const CountText& count);

/// Formats what has a to_string.
template <class Text>
struct TextFormatter : fmt::formatter<std::string> {
  auto format(const Text& text, fmt::format_context& to) const {
    return fmt::formatter<std::string>::format(to_string(text), to);
  }
};

}  // namespace longspan

template <>
struct fmt::formatter<longspan::ShapeText> : longspan::TextFormatter<longspan::ShapeText> {};
template <>
struct fmt::formatter<longspan::CountText> : longspan::TextFormatter<longspan::CountText> {};

namespace longspan {

/// Checks data, type and device. The type must be known, there are at most Tensor::kMaxDims
/// dimensions, no negative extents or strides, and no more elements than 63 bits address.
void check_tensor(const Tensor& t, const char* name, DType dtype, Device device);

/// Checks a tensor that is written: no element has two indices. It asks for what every usual layout
/// has: with the strides in order, each steps over all that the smaller ones reach.
void check_written(const Tensor& t, const char* name);

/// Checks that a result overlaps no input, except that it may be `in` itself where `in_place` says
/// so. Tensors with gaps may lie in each other's gaps, which is not looked into.
void check_overlap(const Tensor& out, const char* out_name, const Tensor& in, const char* in_name,
                   bool in_place = false);

/// Checks, on the host only, that factors of a quantised tensor are finite, and that those which
/// divide are not 0.
void check_scales(const Scales& scales, const char* name, int kv_heads, bool divides);

/// Views [batch, heads, tokens, dim], as models hold queries and results, as rows of the batch, and
/// leaves anything else as it is: [batch * tokens, heads, dim], or, where sequences lie apart, so
/// that rows are not at equal steps, [batch, tokens, heads, dim].
Tensor batch_rows(const Tensor& t, const char* name);
/// Views [batch, tokens, heads] likewise as [batch * tokens, heads], or leaves it.
Lse batch_rows(const Lse& lse, const char* name);

/// What batch_rows gives has so many rows. Of extents that nothing has checked yet the count is
/// negative where one of them is, and at most what 63 bits hold.
std::int64_t count_rows(const Tensor& t, int dims = 3);

/// Throws InputError where tensors whose sequences lie apart do not have the same sequences. (One
/// whose rows are at equal steps goes with any.)
void check_apart(std::initializer_list<const Tensor*> rows, std::initializer_list<const Lse*> lses);

/// Checks [rows, heads, dim] with a dense last dimension; with `rows` < 0 there may be any number.
void check_rows(const Tensor& t, const char* name, std::int64_t rows, std::int64_t heads,
                std::int64_t dim, DType dtype, Device device);

/// Checks what batch_rows gives likewise.
void check_batch_rows(const Tensor& t, const char* name, std::int64_t rows, std::int64_t heads,
                      std::int64_t dim, DType dtype, Device device);

/// Checks [rows, heads] of fp32.
void check_lse(const Tensor& t, const char* name, std::int64_t rows, std::int64_t heads,
               Device device);
/// Checks what batch_rows gives likewise.
void check_batch_lse(const Lse& lse, const char* name, std::int64_t rows, std::int64_t heads,
                     Device device);

/// Checks that the type is fp32, fp16 or bf16.
void check_product_dtype(DType dtype, const char* name);

/// Checks that the type is `dtype`, or an fp8 type with its scale.
void check_quantised(DType found, const char* name, DType dtype, bool has_scale,
                     const char* scale_name);

kernels::Rows rows_of(const Tensor& t);
kernels::LseView lse_of(const Tensor& t);
/// What batch_rows gives, as kernels see it.
kernels::TokenRows token_rows_of(const Tensor& t);
kernels::TokenLse token_lse_of(const Lse& lse);

/// A cache of keys and values as kernels see it.
struct CacheView {
  kernels::KvRows k;
  kernels::KvRows v;
  kernels::Pages pages;   // size and count also without a table, when the cache is in pages
  std::int64_t keys = 0;  // rows in all
  bool packed = false;    // contiguous, sequence after sequence
  // These are of contiguous [batch, capacity, ...], and 0 where sequences are packed, or in pages.
  std::int64_t capacity = 0;  // keys that a sequence has room for
  std::int64_t pitch = 0;     // keys from the start of one sequence to that of the next; 0 where
                              // all sequences share the same keys (a batch stride of 0)

  /// The keys of one sequence that there is room for.
  std::int64_t room() const {
    return pages ? pages.columns * pages.size : packed ? keys : capacity;
  }
};

struct CacheShape {
  std::int64_t kv_heads, head_dim, value_dim;
  DType dtype;
  int batch;
};

/// Views contiguous keys, [keys, kv_heads, head_dim] or [batch, capacity, kv_heads, head_dim], and
/// values of the same form.
CacheView view_contiguous(const Tensor& k, const Tensor& v, const CacheShape& shape, Device device);

/// Whether v is the first columns of k, as in a cache of latent keys: it is one memory, with the
/// same strides.
bool values_in_keys(const Tensor& k, const Tensor& v);

/// The scales of the values. Where v lies in the memory of k, as in a cache of latent keys, what is
/// stored has one scale: that of k, which v_scale may repeat, or leave out. InputError where it is
/// another: on the host by its values, on a GPU, where they are not in reach, by its address. A
/// rank without keys may leave it out, too.
Scales scales_of_values(const Tensor& k, const char* k_name, const Tensor& v, const char* v_name,
                        const Scales& k_scale, const Scales& v_scale, int kv_heads, Device device);

/// Whether new values are due beside new keys. It is false where v is the first columns of k; then
/// there must be none.
bool needs_new_values(const Tensor& new_v, const char* new_name, const Tensor& k,
                      const char* k_name, const Tensor& v, const char* v_name);

/// Checks a cache that is written: k and v (unless they are its first columns) overlap neither
/// themselves, nor each other, nor (contiguous [batch, capacity, ...]) one sequence the next.
void check_written_cache(const Tensor& k, const char* k_name, const Tensor& v, const char* v_name);

/// Views pages (attention.hpp), with or without a table. `k_name` is k or k_cache.
CacheView view_pages(const Tensor& k, const Tensor& v, const Tensor& table, const CacheShape& shape,
                     Device device, const char* k_name, const char* v_name);

}  // namespace longspan
