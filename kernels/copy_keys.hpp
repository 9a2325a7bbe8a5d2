// Copies keys and values from a cache of any form to contiguous rows, so that they can travel.
//
//     to[start[b] + i]           = local key i of sequence b, as a rank sends its share
//     to[start[b] + position(i)] = the same in the order of the sequence, as they are gathered: of
//                                  all ranks, or of neighbours, whose keys are a part of it
//
// Elements keep their type. In pages only keys that some row sees are read, because the entries of
// a block table that no visible key needs may hold anything; the other rows of `to` are not
// written.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/batch_rows.hpp"
#include "kernels/faults.hpp"
#include "kernels/geometry.hpp"
#include "kernels/row_word.hpp"
#include "kernels/tensors.hpp"
#include "longspan/storage.hpp"

namespace longspan::kernels {

struct CopyKeysParams {
  Geometry geometry;  // types and sizes; the shard and the sequences of these keys; and the rows
                      // that determine which pages are read: those of all ranks
  KvRows k;           // location of the keys, as in Operands
  KvRows v;
  Pages pages;
  std::byte* to_k = nullptr;  // [rows, kv_heads, head_dim] of kv_dtype; null: no keys are copied
  std::byte* to_v = nullptr;  // [rows, kv_heads, value_dim]; null: no values
  const std::int64_t* to_start = nullptr;  // [batch] first row of each sequence; null: 0
  bool by_position = false;                // otherwise the keys of a sequence follow each other
  Shard part;  // by position: the share of each sequence that `to` has, possibly all of it
  std::int64_t rows = 0;     // of `to`; keys beyond them are not copied
  std::int64_t longest = 0;  // no sequence has more keys on this rank
};

/// A part of such a copy. Rows that carry their scales travel with them.
struct KeyCopy {
  KvRows from;
  std::byte* to = nullptr;  // null: nothing is copied
  int dim = 0;              // elements of a head that are copied
  int step = 0;             // elements of a head in `to`
};
LONGSPAN_HD inline KeyCopy part_of(const CopyKeysParams& p, KeyPart part) {
  const DType dtype = p.geometry.kv_dtype;
  const bool keys = part == KeyPart::keys;
  const int dim = storage_of(dtype).row_elements(keys ? p.geometry.head_dim : p.geometry.value_dim);
  if (is_latent_row(dtype) && part != KeyPart::values) {
    const RowFormat format = row_format_of(dtype);
    const bool apart = format.apart != 0 && p.k.row_stride == format.data_bytes();
    if (!keys)
      return {p.k.scales_apart(), apart && p.to_k != nullptr ? p.to_k + format.scales_at : nullptr,
              format.apart, dim};
    return {p.k, p.to_k, apart ? format.data_bytes() : dim, dim};
  }
  if (part == KeyPart::scales) return {};
  return keys ? KeyCopy{p.k, p.to_k, dim, dim} : KeyCopy{p.v, p.to_v, dim, dim};
}

/// The local keys of sequence b that are copied.
LONGSPAN_HD inline Interval copied_keys(const CopyKeysParams& p, int b) {
  const Geometry& g = p.geometry;
  const std::int64_t own = g.shard.for_sequence(b).local_len(g.batch.keys(b, g.shard));
  Interval keys{0, own};
  if (p.pages) keys = needed_keys(g, b);
  if (keys.end > own) keys.end = own;
  if (keys.end > p.longest) keys.end = p.longest;
  return keys;
}

/// The location of local key i of sequence b, and its row of `to`; -1: none.
struct KeyPlace {
  CacheRow from;
  std::int64_t to = -1;
};
LONGSPAN_HD inline KeyPlace place_of(const CopyKeysParams& p, int b, std::int64_t i) {
  const Geometry& g = p.geometry;
  const std::int64_t start = p.to_start != nullptr ? p.to_start[b] : 0;
  std::int64_t to = start + i;
  if (p.by_position) {
    const std::int64_t length = g.batch.keys(b, g.shard);
    to = start + p.part.before(g.shard.for_sequence(b).position(i, length), length);
  }
  KeyPlace place{{0, g.batch.first_key(b) + i}, to >= 0 && to < p.rows ? to : -1};
  if (p.pages) place.from = {p.pages.page(b, i), i % p.pages.size};
  return place;
}

/// The widest word in which rows of `copy` can be moved to contiguous rows.
inline int copy_word(const KeyCopy& copy, const Pages& pages, const StorageFormat& format) {
  const KvRows to(copy.to, copy.step, copy.step);
  return std::min(row_word(copy.from, static_cast<bool>(pages), copy.dim, format),
                  row_word(to, false, copy.dim, format));
}

}  // namespace longspan::kernels
