// The parameters of kernels: plain data, passed by value, with the shape of every pointer. Host and
// CUDA kernels take the same structs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "kernels/attend_params.hpp"
#include "kernels/geometry.hpp"
#include "kernels/merge_params.hpp"
#include "kernels/tensors.hpp"
#include "longspan/shard.hpp"
#include "longspan/storage.hpp"
#include "longspan/types.hpp"

namespace longspan::kernels {

/// Writes new keys and values into this rank's cache. Row t of the batch goes to slot slots[t] =
/// page * page_size + row (< 0: not written). Without `slots` it goes to the place of position
/// kv_len - q_len + t by its sequence's shard and page table, if this rank owns it; there `rope`
/// rotates the key. It is stored as kv_dtype: x / scale, fp8 saturating. Slots must be distinct.
struct AppendParams {
  DType dtype = DType::fp32;     // of the new rows
  DType kv_dtype = DType::fp32;  // of the cache
  std::int64_t tokens = 0;
  int kv_heads = 1;
  int head_dim = 0;
  int value_dim = 0;
  Rows new_k;  // [tokens, kv_heads, head_dim]
  Rows new_v;  // [tokens, kv_heads, value_dim]; null if the values are the first columns of the
               // keys
  KvRows k;    // the cache, contiguous (slots count rows) or in pages
  KvRows v;
  Pages pages;
  const std::int64_t* slots = nullptr;  // [tokens]; or null
  Batch batch;                          // without slots
  Shard shard;                          // without slots
  ScaleView k_scale;
  ScaleView v_scale;
  Rope rope;  // without slots
};

/// Sets the sizes and types of an append to those of an attention.
inline void set_sizes(AppendParams& append, const Geometry& g) {
  append.dtype = g.dtype;
  append.kv_dtype = g.kv_dtype;
  append.tokens = g.tokens;
  append.kv_heads = g.kv_heads;
  append.head_dim = g.head_dim;
  append.value_dim = g.value_dim;
}

/// Turns the new keys and values of an attention into a separate append.
inline AppendParams append_of(const AttendParams& p) {
  AppendParams append;
  set_sizes(append, p);
  append.new_k = p.new_k;
  append.new_v = p.new_v;
  append.k = p.k;
  append.v = p.v;
  append.pages = p.pages;
  append.batch = p.batch;
  append.shard = p.shard;
  append.k_scale = p.k_scale;
  append.v_scale = p.v_scale;
  append.rope = p.rope;
  return append;
}

/// Rotates query rows by their positions (rope.hpp). Rows past the last sequence, and of skipped
/// sequences, are not written.
struct RotateParams {
  Geometry geometry;  // whose dtype the rows have
  Rope rope;
  TokenRows from;  // [tokens, heads, head_dim]
  Rows to;         // the same, elsewhere

  /// The position of row `token` of sequence b.
  LONGSPAN_HD std::int64_t position(int b, std::int64_t token) const {
    const std::int64_t first = geometry.first_position(b, geometry.batch.keys(b, geometry.shard));
    const std::int64_t index = geometry.query_index(b, token - geometry.batch.first_row(b)),
                       used = geometry.used_query_len(b);
    return first + (index < used ? index : used - 1);  // rows that are not used need no angles
  }
};

/// Faults in the arrays of a request. `none` is 0.
enum class Fault : std::int32_t {
  none,
  query_start,  // does not start at 0, descends, or ends past the rows
  apart,        // a sequence does not begin at its rows in q, whose sequences lie apart
  kv_len,       // negative
  too_long,     // a sequence has more keys than the cache or its row of the table holds
  page,         // an entry that a visible key needs is not a page
  slot,         // a slot past the cache
  overlap,      // two rows go to one slot
  query_len,    // a sequence has more queries than max_query_len
  qq_width,     // a query is longer than the qq_bias is wide
  segments,     // segments of a given size do not hold all keys of a sequence
  too_many,     // all sequences together have more keys than max_total_keys
  rope,         // the tables of RoPE lack a position
  padding,      // negative, or more keys than the sequence has
  used_rows,    // negative, or more rows than the sequence has
};

/// The first fault found: which sequence or token, which column, and the value.
struct FaultReport {
  Fault fault = Fault::none;
  std::int32_t where = 0;
  std::int64_t column = 0;
  std::int64_t value = 0;
};

/// Checks the arrays of an attend (or append) on their device. `report` keeps the first fault it
/// was ever given, so that it can be read later.
struct CheckParams {
  Geometry geometry;
  Pages pages;
  KeyParts parts;
  bool is_append = false;
  const std::int64_t* slots = nullptr;  // [tokens] of an append; or null
  std::int64_t slot_count = -1;         // rows of the cache; -1: unknown
  std::int64_t sequence_rows = 0;       // of each sequence in a q whose sequences lie apart; or 0
  std::int64_t most_keys = 0;           // of all sequences together; 0: any number
  std::int64_t rope_positions = 0;      // in the tables of RoPE; 0: no tables
  std::uint32_t* claimed = nullptr;     // [slot_count / 32 + 1] zeros, for overlaps; or null
  FaultReport* report = nullptr;
};

/// The checks of an attention over a cache of `slot_count` rows.
inline CheckParams checks_of(const AttendParams& p, std::int64_t slot_count) {
  return {.geometry = p,
          .pages = p.pages,
          .parts = p.parts,
          .slot_count = slot_count,
          .sequence_rows = p.q.gap.rows,
          .rope_positions = p.rope.positions};
}

/// Computes the index of sharded query rows in the whole q, or of sharded keys in whole sequences,
/// or in the part of them that neighbouring ranks hold together. The i-th row of the batch on rank
/// first + p has index map[p * capacity + i], -1 past its last.
struct MapParams {
  Shard shard;  // of the rows; rank is ignored
  Batch batch;  // query_start of the whole q; or of_keys, kv_len and key_start of their parts
  int ranks = 1;
  std::int64_t capacity = 0;
  std::int64_t* map = nullptr;  // [ranks, capacity]
  int first = 0;
  Shard part;                                // the share of the rows that `ranks` ranks hold
                                             // together
  const std::int32_t* part_start = nullptr;  // [batch + 1] starts of its sequences, if it is not
                                             // all
  bool of_keys = false;                      // the rows are keys

  /// The rows of sequence b on all ranks.
  LONGSPAN_HD std::int64_t rows_of(int b) const {
    return of_keys ? batch.keys(b, shard) : batch.query_len(b, shard.length);
  }
  /// The index of the i-th row that `own`, the share of a rank, has of sequence b.
  LONGSPAN_HD std::int64_t row(const Shard& own, int b, std::int64_t i) const {
    const std::int64_t length = rows_of(b);
    const std::int64_t position = own.for_sequence(b).position(i, length);
    if (of_keys) return batch.first_key(b) + part.before(position, length);
    if (part.ranks == 1) return batch.first_row(b) + position;
    return (part_start != nullptr ? part_start[b] : 0) + part.before(position, length);
  }
};

/// to[map[i]] = from[i] if map[i] is one of `places`; a null map copies. Rows have any size, at any
/// address.
struct PlaceParams {
  const std::byte* from = nullptr;    // [count, row_bytes]
  std::byte* to = nullptr;            // [any, row_bytes]
  const std::int64_t* map = nullptr;  // [count], or null
  std::int64_t count = 0;
  std::int64_t row_bytes = 0;
  // The rows of `to`, if the map came from other ranks and may hold anything.
  std::int64_t places = std::numeric_limits<std::int64_t>::max();
};

/// The widest word, up to 16 bytes, that divides the rows and their start addresses.
inline int place_word(const PlaceParams& p) {
  const std::uintptr_t all = reinterpret_cast<std::uintptr_t>(p.from) |
                             reinterpret_cast<std::uintptr_t>(p.to) |
                             static_cast<std::uintptr_t>(p.row_bytes);
  for (int word = 16; word > 1; word /= 2)
    if (all % static_cast<std::uintptr_t>(word) == 0) return word;
  return 1;
}

/// Computes the first local key of each sequence if the rank's keys are packed: an exclusive prefix
/// sum of shard.local_len(kv_len[b]).
struct KeyStartParams {
  Shard shard;
  const std::int32_t* kv_len = nullptr;  // [batch]
  std::int64_t capacity = 0;             // > 0: keys are [batch, capacity]; start = b * capacity
  int batch = 0;
  std::int64_t* key_start = nullptr;  // [batch]
};

/// Computes the first row of each sequence among a rank's query rows of a batch: a prefix sum of
/// shard.local_len(query_len of b), including the end of the last one.
struct RowStartParams {
  Shard shard;
  const std::int32_t* whole_start = nullptr;  // [batch + 1] rows of all ranks
  int batch = 0;
  std::int32_t* start = nullptr;  // [batch + 1]
  // The rank's rows, if known: no start exceeds them.
  std::int64_t rows = std::numeric_limits<std::int32_t>::max();

  LONGSPAN_HD std::int32_t within(std::int64_t row) const {
    return static_cast<std::int32_t>(row < rows ? row : rows);
  }
};

/// Splits each sequence at its context: ranges[b] = {0, kv_len - q_len, kv_len} (a context below 0
/// is 0). This is the table of a Layout::ranges of two "ranks", the cached keys and the new ones.
struct ContextCutParams {
  Batch batch;
  std::int64_t tokens = 0;
  std::int64_t* ranges = nullptr;  // [batch, 3]
};

}  // namespace longspan::kernels
