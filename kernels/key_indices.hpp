// Sparse attention by indices: each query row names the keys that it sees. The indices are made a
// compact list of this rank's rows of the cache, and then a row is a sequence of its own:
//
//     indices of row t           5  -1  130  7        (positions, or rows of the cache)
//     this rank holds 0 to 127   5           7
//     compact                    row of 5, row of 7; count 2
//     attention                  one query over 2 keys, in pages of one key
//
// So every kernel that reads pages serves sparse attention, in whatever form it reads their rows. A
// row without keys of this rank has an empty state.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attend_params.hpp"
#include "longspan/starts.hpp"

namespace longspan::kernels {

/// How to make the list. Entry [t * heads + h, i] is the i-th key of this rank that row t sees in
/// kv head h (or in all kv heads, with one list for them). It counts steps of CompactKeys::unit
/// from the start of the cache.
struct CompactParams {
  KeyIndices indices;
  std::int64_t tokens = 0;
  Batch batch;
  Shard shard;
  Pages pages;
  bool in_pages = false;            // the cache is in pages, with or without a table
  std::int64_t page_step = 0;       // of entries: from page to page of the cache
  std::int64_t row_step = 1;        // from row to row of a page, or of a contiguous cache
  std::int64_t head_step = 0;       // from kv head to kv head
  std::int32_t* entries = nullptr;  // [tokens * heads, top_k]
  std::int32_t* counts = nullptr;   // [tokens * heads] of each list
  std::int32_t* starts = nullptr;   // [tokens * heads + 1] i, up to the rows of the batch

  LONGSPAN_HD std::int64_t lists() const { return tokens * indices.heads; }

  /// The rows of the batch; those after them belong to no sequence.
  LONGSPAN_HD std::int64_t rows() const {
    const std::int64_t end = batch.query_start ? batch.query_start[batch.size] : tokens;
    return end < tokens ? end : tokens;
  }
};

/// The list of one row and head. Kernels make one of it, and then ask for the entry of each index.
struct CompactList {
  const std::int32_t* from;  // [count] indices
  std::int32_t* to;          // [count]
  int count;                 // of the indices
  int sequence;
  std::int64_t kv_len, padding;
  std::int64_t head_offset;  // of entries
  Shard shard;               // of the sequence

  LONGSPAN_HD CompactList(const CompactParams& p, std::int64_t list) {
    const KeyIndices& all = p.indices;
    const std::int64_t token = list / all.heads, head = list - token * all.heads;
    from = all.data + token * all.row_stride + head * all.head_stride;
    to = p.entries + list * all.top_k;
    sequence = p.batch.query_start == nullptr
                   ? 0
                   : last_start(p.batch.size, token, [&](int b) { return p.batch.query_start[b]; });
    const std::int64_t index = token - p.batch.first_row(sequence);
    const bool is_used =
        token < p.rows() && (p.batch.used_rows == nullptr || index < p.batch.used_rows[sequence]);
    const std::int64_t given = all.lengths != nullptr ? all.lengths[token] : all.top_k;
    count = !is_used || given < 0 ? 0 : static_cast<int>(given < all.top_k ? given : all.top_k);
    kv_len = p.batch.keys(sequence, p.shard);
    padding = p.batch.padding(sequence);
    head_offset = head * p.head_step;
    shard = p.shard.for_sequence(sequence);
  }

  /// The entry of an index, or -1 for one that names no key of this rank.
  LONGSPAN_HD std::int32_t entry(const CompactParams& p, std::int32_t index) const {
    std::int64_t page = 0, row = index;
    if (p.indices.are_slots) {
      if (index < 0 || index >= p.indices.slots) return -1;
      if (p.in_pages) {
        page = index / p.pages.size;
        row = index % p.pages.size;
      }
    } else {
      if (index < padding || !shard.owns(index, kv_len)) return -1;
      const std::int64_t local = shard.before(index, kv_len);
      row = p.batch.first_key(sequence) + local;
      if (p.pages) {
        page = p.pages.page(sequence, local);
        row = local % p.pages.size;
      }
    }
    return static_cast<std::int32_t>(page * p.page_step + row * p.row_step + head_offset);
  }
};

/// Throws Unsupported for what does not go with indices.
void check_indices(const AttendParams& p);

/// The bytes of the lists of a call, at the start of its scratch; and of any call within limits.
std::size_t compact_bytes(const AttendParams& p);

/// The attention of lists, each a sequence of one row, within the limits of `bounds`.
AttendParams attention_of_lists(const AttendParams& bounds);

/// The two steps of an attention by indices.
struct SparseAttention {
  CompactParams compact;
  AttendParams attend;  // of lists
};

/// Divides a call into its steps. Throws Unsupported for strides that no list of entries describes,
/// and InputError for too little scratch.
SparseAttention sparse_attention(const AttendParams& p);

/// The most scratch that calls within these bounds need; attend_scratch(p) is that of an attention
/// without indices.
template <class Scratch>
std::size_t sparse_scratch(AttendParams bounds, const Scratch& attend_scratch) {
  const std::size_t lists = compact_bytes(bounds),
                    alike = attend_scratch(attention_of_lists(bounds));
  bounds.indices.heads = 1;
  const std::size_t shared = attend_scratch(attention_of_lists(bounds));
  return lists + (alike > shared ? alike : shared);
}

}  // namespace longspan::kernels
