// The widest word in which rows of a cache can be copied: it divides the address, the strides, and
// each contiguous chunk.
#pragma once

#include <cstdint>

#include "kernels/tensors.hpp"
#include "longspan/storage.hpp"

namespace longspan::kernels {

/// Up to 16 bytes; one element if elements of a row are not adjacent. A copy uses the narrower word
/// of its two ends.
inline int row_word(const KvRows& rows, bool in_pages, int dim, const StorageFormat& format) {
  const int element_bytes = (format.bits + 7) / 8;
  if (rows.dim_stride != 1) return element_bytes;
  std::int64_t strides = rows.row_stride | rows.head_stride | dim;
  if (in_pages) strides |= rows.page_stride;
  if (!rows.dense()) strides |= rows.chunk | rows.chunk_stride;
  const std::int64_t all = format.bytes(strides) |
                           static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(rows.data));
  int word = 16;
  while (word > element_bytes && all % word != 0) word /= 2;
  return word;
}

}  // namespace longspan::kernels
