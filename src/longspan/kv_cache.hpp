// A paged cache of keys and values. Its tensors are views of the caller's memory, with any strides:
//
//     rows      K [pages, page, kv_heads, head_dim], V [pages, page, kv_heads, value_dim]
//     x-packed  K [pages, kv_heads, head_dim / x, page, x]   x = 16 bytes of elements, as a rule
//               V [pages, kv_heads, value_dim, page]
//
// In rows, V may be the first columns of K: the same memory and strides with fewer columns, as in a
// cache of latent keys (MLA). Then new values are never given: they come with the new keys.
//
// A block table says which page holds the i-th keys of a sequence. In a sharded cache each rank has
// its own pages and its own table: local key i of a sequence (shard.hpp says which position that
// is) lies in row i % page of page table[i / page]. Entries that no visible key needs are neither
// checked nor read.
#pragma once

#include <cstdint>

namespace longspan {

struct BlockTable {
  const std::int32_t* data = nullptr;  // [batch, columns], on the layer's device; null: not paged
  std::int64_t columns = 0;            // pages of a sequence, at most
  std::int64_t row_stride = 0;         // in entries; 0: columns
  std::int64_t column_stride = 1;

  explicit operator bool() const { return data != nullptr; }
};

}  // namespace longspan
