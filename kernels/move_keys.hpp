// Moves keys and values between two places of any form, run by run, following a list.
//
//     to[sequence, to_key + i] = from[sequence, from_key + i]      for i in [0, count)
//
// Either place is a cache, or contiguous rows as they travel. Bytes are unchanged. Entries of a
// block table that are not a page of the cache are not followed: their keys are left out.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/batch_rows.hpp"
#include "kernels/merge_params.hpp"
#include "kernels/row_word.hpp"
#include "kernels/tensors.hpp"
#include "longspan/storage.hpp"

namespace longspan::kernels {

/// Keys that are consecutive at both places.
struct KeyRun {
  static constexpr std::int32_t kMostKeys = 16;  // of one run of a list, for an even load

  std::int64_t from_key = 0;
  std::int64_t to_key = 0;
  std::int32_t sequence = 0;
  std::int32_t count = 0;
};

/// The location of the keys of a batch. Key i of sequence b is row i of the sequence's pages, or
/// otherwise row start[b] + i, or b * pitch + i.
struct KeyStore {
  KvRows k;
  KvRows v;  // without data: no values
  Pages pages;
  const std::int64_t* start = nullptr;  // [batch]; or null
  std::int64_t pitch = 0;

  /// The row of the cache for key i of sequence b.
  LONGSPAN_HD CacheRow row(int b, std::int64_t i) const {
    if (!pages) return {0, (start != nullptr ? start[b] : b * pitch) + i};
    const std::int64_t page = pages.page(b, i);
    if (page < 0 || page >= pages.count) return {};
    return {page, i % pages.size};
  }
};

struct MoveKeysParams {
  KeyStore from;
  KeyStore to;
  const KeyRun* runs = nullptr;  // [count], no key of `to` twice
  std::int64_t count = 0;
  DType dtype = DType::fp32;
  int kv_heads = 1;
  int head_dim = 0;
  int value_dim = 0;
  RunHeaders headers;  // if ranks report different runs, nothing is written (CUDA)
};

/// A part of such a move; dim 0: nothing is moved. Rows that carry their scales move with them.
struct KeyMove {
  KvRows from;
  KvRows to;
  int dim = 0;  // elements of a head
};
LONGSPAN_HD inline KeyMove part_of(const MoveKeysParams& p, KeyPart part) {
  if (part == KeyPart::values) {
    const bool has_values = p.from.v.data != nullptr && p.to.v.data != nullptr;
    return {p.from.v, p.to.v, has_values ? p.value_dim : 0};
  }
  const RowFormat format = row_format_of(p.dtype);
  if (part == KeyPart::scales)
    return {p.from.k.scales_apart(), p.to.k.scales_apart(), format.apart};
  return {p.from.k, p.to.k,
          format.apart != 0 ? format.data_bytes() : storage_of(p.dtype).row_elements(p.head_dim)};
}

/// The widest word in which rows can be moved.
inline int move_word(const MoveKeysParams& p, const KeyMove& move) {
  const StorageFormat format = storage_of(p.dtype);
  return std::min(row_word(move.from, static_cast<bool>(p.from.pages), move.dim, format),
                  row_word(move.to, static_cast<bool>(p.to.pages), move.dim, format));
}

}  // namespace longspan::kernels
