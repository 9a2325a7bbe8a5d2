// Checks that every call makes of its tensors. Each refusal names the tensor, what is wanted, what
// was found, and what to do.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <utility>

#include "kernels/params.hpp"
#include "longspan/error.hpp"
#include "longspan/storage.hpp"
#include "longspan/tensor.hpp"

namespace longspan {

/// The limit of counts that kernels keep in 32 bits: tokens, sequences, keys, pages.
inline constexpr std::int64_t kMostCount = std::numeric_limits<std::int32_t>::max();

template <class... Args>
void require(bool holds, fmt::format_string<Args...> format, Args&&... args) {
  if (!holds) throw InputError(fmt::format(format, std::forward<Args>(args)...));
}

/// Throws UsageError with the text `what` unless the options hold. Options are checked once, so the
/// text may be made before the check.
inline void usage(bool holds, const std::string& what) {
  if (!holds) throw UsageError(what);
}

/// A tensor's shape in a message. The text is made only if a check fails: a run makes dozens of
/// checks, and each text would take longer than all of them.
struct ShapeText {
  const Tensor& tensor;
};
inline ShapeText shape_text(const Tensor& t) { return {t}; }
std::string to_string(const ShapeText& shape);

/// The wanted number; below 0, a text for any number.
struct CountText {
  std::int64_t count;
  const char* any;
};
std::string to_string(const CountText& count);

/// Formats types that have a to_string.
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

/// Checks data, type and device. The type must be known. There are at most Tensor::kMaxDims
/// dimensions, no negative extents or strides, and at most as many elements as 63 bits address.
void check_tensor(const Tensor& t, const char* name, DType dtype, Device device);

/// Checks a tensor that is written: no element has two indices. It requires the property of every
/// usual layout: in order of size, each stride steps over all that the smaller ones reach.
void check_written(const Tensor& t, const char* name);

/// Checks that a result overlaps no input, except that it may be `in` itself if `in_place` is set.
/// It does not detect tensors that lie in each other's gaps.
void check_overlap(const Tensor& out, const char* out_name, const Tensor& in, const char* in_name,
                   bool in_place = false);

/// The index of a scale in its array, for messages: "kv_head", or "sequence, kv_head".
std::string scale_index(const ScaleView& scales, int sequence, int kv_head);

/// Checks, on the host only, that the scales of a quantised tensor are finite, and those used as
/// divisors not 0.
void check_scales(const ScaleView& scales, const char* name, int batch, int kv_heads, bool divides);

/// Views [batch, heads, tokens, dim], as models hold queries and results, as rows of the batch:
/// [batch * tokens, heads, dim], or [batch, tokens, heads, dim] if sequences lie apart, so that
/// rows have no equal steps. Leaves anything else unchanged.
Tensor batch_rows(const Tensor& t, const char* name);
/// The same for [batch, tokens, heads]: views it as [batch * tokens, heads], or leaves it
/// unchanged.
Lse batch_rows(const Lse& lse, const char* name);

/// The number of rows of a result of batch_rows. For unchecked extents the count is negative if one
/// of them is, and at most the largest number of 63 bits.
std::int64_t count_rows(const Tensor& t, int dims = 3);

/// Throws InputError if tensors whose sequences lie apart have different sequences. (One whose rows
/// have equal steps goes with any.)
void check_apart(std::initializer_list<const Tensor*> rows, std::initializer_list<const Lse*> lses);

/// Checks [rows, heads, dim] with a dense last dimension; with `rows` < 0 any number is right.
void check_rows(const Tensor& t, const char* name, std::int64_t rows, std::int64_t heads,
                std::int64_t dim, DType dtype, Device device);

/// The same for a result of batch_rows.
void check_batch_rows(const Tensor& t, const char* name, std::int64_t rows, std::int64_t heads,
                      std::int64_t dim, DType dtype, Device device);

/// Checks [rows, heads].
void check_lse(const Tensor& t, const char* name, std::int64_t rows, std::int64_t heads,
               Device device, DType dtype = DType::fp32);
/// The same for a result of batch_rows.
void check_batch_lse(const Lse& lse, const char* name, std::int64_t rows, std::int64_t heads,
                     Device device, DType dtype = DType::fp32);

/// Checks that the type is fp32, fp16 or bf16.
void check_product_dtype(DType dtype, const char* name);

/// Checks that the type is `dtype`, or an fp8 type with its scale.
void check_quantised(DType found, const char* name, DType dtype, bool has_scale,
                     const char* scale_name);

kernels::Rows rows_of(const Tensor& t);
kernels::LseView lse_of(const Tensor& t);
/// Views a result of batch_rows as kernels take it.
kernels::TokenRows token_rows_of(const Tensor& t);
kernels::TokenLse token_lse_of(const Lse& lse);

/// A cache of keys and values as kernels take it.
struct CacheView {
  kernels::KvRows k;
  kernels::KvRows v;
  kernels::Pages pages;   // size and count also without a table, if the cache is in pages
  std::int64_t keys = 0;  // total rows
  bool packed = false;    // contiguous, sequence after sequence
  // For contiguous [batch, capacity, ...]; 0 if sequences are packed, or in pages.
  std::int64_t capacity = 0;  // keys that fit a sequence
  std::int64_t pitch = 0;     // keys from the start of one sequence to the start of the next; 0 if
                              // all sequences share the same keys (a batch stride of 0)

  /// Says where the scales of rows of this type are, if they carry them.
  void carry_scales(DType dtype) {
    for (kernels::KvRows* rows : {&k, &v})
      rows->carry_scales(row_format_of(dtype), pages.count > 0 ? pages.size : 0);
  }
  /// The number of keys of one sequence that fit.
  std::int64_t room() const {
    return pages ? pages.columns * pages.size : packed ? keys : capacity;
  }
};

struct CacheShape {
  std::int64_t kv_heads, head_dim, value_dim;
  DType dtype;
  int batch;

  /// The shape of the tensors: of rows that carry their scales the columns are bytes.
  CacheShape stored() const {
    const StorageFormat format = storage_of(dtype);
    return {kv_heads, format.row_elements(static_cast<int>(head_dim)),
            format.row_elements(static_cast<int>(value_dim)), tensor_type_of(dtype), batch};
  }
};

/// Checks a cache whose rows carry their scales, of type `dtype`; any other passes.
void check_latent_rows(const Tensor& t, const char* name, DType dtype);
/// Throws Unsupported for rows that are read only.
void check_rows_are_written(DType dtype);

/// Views contiguous keys, [keys, kv_heads, head_dim] or [batch, capacity, kv_heads, head_dim], and
/// values of the same form.
CacheView view_contiguous(const Tensor& k, const Tensor& v, const CacheShape& shape, Device device);

/// The scales of the values. If v lies in the memory of k, as in a cache of latent keys, the stored
/// values have one scale: that of k, which v_scale may repeat, or leave out. InputError for a
/// different scale: compared by value on the host, by address on a GPU, whose values cannot be read
/// here. A rank without keys may leave it out, too.
ScaleView scales_of_values(const Tensor& k, const char* k_name, const Tensor& v, const char* v_name,
                           const ScaleView& k_scale, const ScaleView& v_scale, int batch,
                           int kv_heads, Device device);

/// Whether new keys need new values. False if v is the first columns of k; then there must be none.
bool needs_new_values(const Tensor& new_v, const char* new_name, const Tensor& k,
                      const char* k_name, const Tensor& v, const char* v_name);

/// Checks a cache that is written: k and v (unless v is k's first columns) overlap neither
/// themselves nor each other, and in contiguous [batch, capacity, ...] no sequence overlaps the
/// next.
void check_written_cache(const Tensor& k, const char* k_name, const Tensor& v, const char* v_name);

/// Views pages (attention.hpp), with or without a table. `k_name` is k or k_cache.
CacheView view_pages(const Tensor& k, const Tensor& v, const Tensor& table, const CacheShape& shape,
                     Device device, const char* k_name, const char* v_name);

/// Views a cache of which indices name rows (IndexOptions::slots): pages without a table, or
/// contiguous keys. It has room for sequences of any length, since no length says where keys lie.
CacheView view_slots(const Tensor& k, const Tensor& v, const CacheShape& shape, Device device);

}  // namespace longspan
