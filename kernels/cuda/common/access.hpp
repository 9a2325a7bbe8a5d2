// Which elements of a cache are adjacent, and so can be read many bytes at a time, on host and
// device.
#pragma once

#include <cstdint>

#include "kernels/params.hpp"

namespace longspan::kernels::cuda {

/// Adjacent elements: eight elements of a row, one element of eight keys (V in [pages, kv_heads,
/// dim, page]), or neither.
enum class Access : std::uint8_t { chunks, keys, elements };

/// Whether addresses are multiples of 8 elements.
LONGSPAN_HD inline bool aligned_to_eight(const void* data, int bytes, std::int64_t strides) {
  return (static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(data)) & (8 * bytes - 1)) ==
             0 &&
         (strides & 7) == 0;
}

/// How the rows of `source`, of `dim` elements of `bytes` bytes, may be read. A row that ends
/// inside of eight elements is read one by one: what follows is not its own.
LONGSPAN_HD inline Access access_of(const KvRows& source, const Pages& pages, int bytes, int dim) {
  if ((dim & 7) != 0) return Access::elements;
  const std::int64_t outer = source.head_stride | (pages ? source.page_stride : 0);
  const std::int64_t row = pages && pages.size == 1 ? 0 : source.row_stride;
  if (source.dim_stride == 1 && source.chunk % 8 == 0 &&
      aligned_to_eight(source.data, bytes, outer | row | source.chunk_stride))
    return Access::chunks;
  const std::int64_t inner =
      source.dim_stride | (source.dense() || source.chunk >= 256 ? 0 : source.chunk_stride);
  if (pages && pages.size % 8 == 0 && source.row_stride == 1 &&
      aligned_to_eight(source.data, bytes, outer | inner))
    return Access::keys;
  return Access::elements;
}

/// The bytes of one access to kCount elements.
template <int kCount>
constexpr int access_bytes(DType dtype) {
  const int bytes = static_cast<int>(storage_of(dtype).row_bytes(kCount));
  return bytes < 16 ? bytes : 16;
}

/// Whether kCount elements at a time of every row of `rows` can be accessed like that.
template <int kCount>
bool is_aligned(const Rows& rows, DType dtype) {
  const StorageFormat format = storage_of(dtype);
  const int access = access_bytes<kCount>(dtype);
  return reinterpret_cast<std::uintptr_t>(rows.data) % access == 0 &&
         format.bytes(rows.row_stride) % access == 0 &&
         format.bytes(rows.head_stride) % access == 0;
}

template <int kCount>
bool is_aligned(const TokenRows& rows, DType dtype) {
  const std::int64_t gap = storage_of(dtype).bytes(rows.gap.elements);
  return is_aligned<kCount>(static_cast<const Rows&>(rows), dtype) &&
         gap % access_bytes<kCount>(dtype) == 0;
}

}  // namespace longspan::kernels::cuda
