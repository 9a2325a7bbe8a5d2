// What every call asks of its tensors. Each refusal names the tensor, what is wanted, what was
// found, and what to do.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <utility>

#include "kernels/params.hpp"
#include "longspan/element.hpp"
#include "longspan/error.hpp"
#include "longspan/tensor.hpp"

namespace longspan {

template <class... Args>
void require(bool holds, fmt::format_string<Args...> format, Args&&... args) {
  if (!holds) throw InputError(fmt::format(format, std::forward<Args>(args)...));
}

std::string shape_text(const Tensor& t);

/// Data, type, device; a known type, at most Tensor::kMaxDims dimensions, no negative extents or
/// strides, and no more elements than 63 bits address.
void check_tensor(const Tensor& t, const char* name, DType dtype, Device device);

/// What is written: no element has two indices. Asked is what every usual layout has: with the
/// strides in order, each steps over all that the smaller ones reach.
void check_written(const Tensor& t, const char* name);

/// A result may be `in` itself where `in_place` says so, and overlaps no input otherwise. Tensors
/// with gaps may lie in each other's gaps, which is not looked into.
void check_overlap(const Tensor& out, const char* out_name, const Tensor& in, const char* in_name,
                   bool in_place = false);

/// Host only: factors of a quantised tensor are finite; those that divide are not 0.
void check_scales(const Scales& scales, const char* name, int kv_heads, bool divides);

/// [batch, heads, tokens, dim], as models hold queries and results, viewed as [batch * tokens,
/// heads, dim]; anything else as it is. InputError where no strides do that: the rows of a sequence
/// begin where those of the one before it end.
Tensor flat_rows(const Tensor& t, const char* name);
/// Likewise [batch, tokens, heads] viewed as [batch * tokens, heads].
Lse flat_rows(const Lse& lse, const char* name);

/// [rows, heads, dim] with a dense last dimension; `rows` < 0: any number.
void check_rows(const Tensor& t, const char* name, std::int64_t rows, std::int64_t heads,
                std::int64_t dim, DType dtype, Device device);

/// [rows, heads] fp32.
void check_lse(const Tensor& t, const char* name, std::int64_t rows, std::int64_t heads,
               Device device);

/// fp32, fp16 or bf16.
void check_product_dtype(DType dtype, const char* name);

/// `dtype`, or an fp8 type with its scale.
void check_quantised(DType found, const char* name, DType dtype, bool has_scale,
                     const char* scale_name);

kernels::Rows rows_of(const Tensor& t);
kernels::LseView lse_of(const Tensor& t);

/// A cache of keys and values as kernels see it.
struct CacheView {
  kernels::KvRows k;
  kernels::KvRows v;
  kernels::Pages pages;   // size and count also without a table, when the cache is in pages
  std::int64_t keys = 0;  // rows in all
  bool packed = false;    // contiguous, sequence after sequence
  // Contiguous [batch, capacity, ...]; 0 where sequences are packed, or in pages.
  std::int64_t capacity = 0;  // keys that a sequence has room for
  std::int64_t pitch = 0;     // keys from the start of one sequence to that of the next; 0 where
                              // all sequences share the same keys (a batch stride of 0)

  /// Keys of one sequence that there is room for.
  std::int64_t room() const {
    return pages ? pages.columns * pages.size : packed ? keys : capacity;
  }
};

struct CacheShape {
  std::int64_t kv_heads, head_dim, value_dim;
  DType dtype;
  int batch;
};

/// Contiguous keys: [keys, kv_heads, head_dim], or [batch, capacity, kv_heads, head_dim]; values
/// alike.
CacheView view_contiguous(const Tensor& k, const Tensor& v, const CacheShape& shape, Device device);

/// Whether v is the first columns of k, as in a cache of latent keys: one memory, strides alike.
bool values_in_keys(const Tensor& k, const Tensor& v);

/// Whether new values are due beside new keys. False where v is the first columns of k; then there
/// must be none.
bool needs_new_values(const Tensor& new_v, const char* new_name, const Tensor& k,
                      const char* k_name, const Tensor& v, const char* v_name);

/// A cache that is written: k and v (unless they are its first columns) overlap neither themselves,
/// nor each other, nor (contiguous [batch, capacity, ...]) one sequence the next.
void check_written_cache(const Tensor& k, const char* k_name, const Tensor& v, const char* v_name);

/// Pages (attention.hpp), with or without a table. `k_name`: k or k_cache.
CacheView view_pages(const Tensor& k, const Tensor& v, const Tensor& table, const CacheShape& shape,
                     Device device, const char* k_name, const char* v_name);

}  // namespace longspan
