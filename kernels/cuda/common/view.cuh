// Work tiles, and what their rows see. The rows of a kv head's group are packed (GQA packing): row
// r of a sequence is token r / group, head r % group of the group. Short queries thus fill a tile,
// and a tile of long ones spans few tokens.
//
// Positions ascend with the local key index in every layout but `listed`, so the keys that a row
// may see are an interval of local keys too. It is computed once, and the loops compare local
// indices.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/divisor.hpp"
#include "kernels/cuda/common/fixed_order.cuh"
#include "kernels/params.hpp"
#include "longspan/starts.hpp"

namespace longspan::kernels::cuda {

/// Sequences of up to this many query tokens use the decode kernel, whatever the rest of the batch.
inline constexpr int kShortQuery = 16;

/// The most splits of a sequence's keys.
inline constexpr int kMostSplits = 256;

/// The most sequences whose pieces are ordered by length (WorkPlan::by_length).
inline constexpr int kMostSorted = 128;

/// The sequences of the batch that a launch serves; it skips the others. `short_but_one` are the
/// short ones without sequences of one query (Batch::skip_decode).
enum class Lengths : std::uint8_t { only_short, only_long, short_but_one };

LONGSPAN_HD inline bool serves(Lengths lengths, std::int64_t q_len) {
  if (lengths == Lengths::short_but_one && q_len == 1) return false;
  return (q_len > kShortQuery) == (lengths == Lengths::only_long);
}

struct Sequence {
  int index;                 // in the batch
  std::int64_t first_row;    // of q
  std::int64_t context_len;  // position of its first query, on any rank
  std::int64_t kv_len;       // on all ranks
  std::int64_t first_key;    // of k and v
  std::int64_t local_len;    // keys on this rank
};

LONGSPAN_HD inline Sequence sequence_of(const Geometry& p, int b) {
  const std::int64_t kv_len = p.batch.keys(b, p.shard);
  return {b,      p.batch.first_row(b), p.first_position(b, kv_len),
          kv_len, p.batch.first_key(b), p.shard.for_sequence(b).local_len(kv_len)};
}

inline constexpr int kNever = 0x7fffffff;

/// The splits of a plan that a kernel used, if lengths decide.
struct alignas(8) SplitsTaken {
  int leaf_splits;  // log2 of the splits of a leaf; SplitNumbers::leaf_splits at most
  int turns;        // turns of SplitNumbers::split that have keys; other splits are not written
};

/// How full a tree of 2^levels entries is with `total` segments: 0 is half full or less, 15 is
/// full.
inline constexpr int kFills = 16;
LONGSPAN_HD inline int fill_of(int total, int levels) {
  const int of_32 = static_cast<int>(std::int64_t{total} * 2 * kFills >> levels) - kFills;
  return of_32 < 0 ? 0 : of_32 < kFills ? of_32 : kFills - 1;
}

/// The numbering of the splits of a plan.
struct SplitNumbers {
  int leaves = 0;         // log2 of the order's leaves, if each is cut into several splits, or of
                          // other equal parts of its tree
  int leaf_splits = 0;    // log2 of the splits of a leaf
  bool reversed = false;  // leaves with more segments than others come first in bit-reversed order
  // Null: all splits are used. Otherwise decode chooses, and stores its choice here.
  SplitsTaken* taken = nullptr;
  bool where_uneven = false;  // it cuts leaves if the lengths of several sequences differ
  // Otherwise, for one sequence: the leaf_splits, of 4 bits each, that pay off in a tree that is
  // half full (fill_of), 1/32 more, ... full.
  std::uint64_t worth = 0;

  /// The split with index `turn` if leaves have 2^few splits each: first the first one of every
  /// leaf, then the second ones. If the order's tree is half empty, as just past a power of two,
  /// the splits without keys come last.
  LONGSPAN_HD int split(int turn, int few) const {
    const int place = turn & ((1 << leaves) - 1);
    const int leaf = reversed ? reverse_bits(place, leaves) : place;
    return leaf << leaf_splits | turn >> leaves << (leaf_splits - few);
  }

  /// The choice in which no leaf is cut, or every leaf is cut.
  LONGSPAN_HD SplitsTaken all_of(bool cut) const {
    return {cut ? leaf_splits : 0, 1 << (leaves + (cut ? leaf_splits : 0))};
  }

  LONGSPAN_HD bool holds(const SplitsTaken& all, int split) const {
    const int leaf = split >> leaf_splits, skipped = leaf_splits - all.leaf_splits;
    const int of_leaf = split & ((1 << leaf_splits) - 1);
    const int place = reversed ? reverse_bits(leaf, leaves) : leaf;
    return (of_leaf & ((1 << skipped) - 1)) == 0 &&
           (of_leaf >> skipped << leaves | place) < all.turns;
  }
};

/// How a launch divides its work into row tiles x kv heads x splits of the keys.
struct WorkPlan {
  Lengths lengths = Lengths::only_long;
  int tile_rows = 1;       // packed rows in a tile
  int tiles = 1;           // in the batch; an upper bound
  int sequence_tiles = 0;  // > 0: tiles of each sequence; 0: they are packed, see first_tile
  int splits = 1;          // a power of two; each takes an aligned part of the fixed order's tree.
                           // With AttendParams::parts it is their number, and each has its own
                           // state
  SplitNumbers numbers;    // of them
  int works = 0;           // tiles x kv heads x splits; some turn out to be empty
  int by_length = kNever;  // work tiles from here on are ordered by sequence, the longest first
                           // (decode_order.cuh); row tiles are sequences then
  Divisor by_tiles, by_sequence_tiles, by_kv_heads, by_group;  // of this plan and its call
  Divisor by_late_works;   // of the works from by_length on those of one sequence
  Divisor by_page;         // of keys
  bool known = false;      // lengths, and all other inputs of the scheduler, are parameters
  int* ticket = nullptr;   // zero at the start; it hands out the work tiles past the first of each
                           // block. Decode resets it to zero
  int depth = 0;           // levels of the fixed order's stack
  float* stack = nullptr;  // [blocks, depth, floats of a block]; see FoldStack
  StateSlots parts;        // splits of one state: [splits] slots of the rows part_row(...)
  int part_tokens = 0;     // > 0: tokens of a sequence in `parts`; 0: its rows are those of q
};

/// The location of a work tile, which one thread block takes.
struct TileCoord {
  int sequence;
  int kv_head;
  int split;
  std::int64_t first;  // packed row
  int rows;            // packed rows; 0: nothing to do
  Divisor by_group;    // heads of a kv head
};

/// The first tile of sequence b if tiles are packed over the batch, with at most one empty tile for
/// each sequence. It can be computed, and searched, without a prefix sum.
LONGSPAN_HD inline std::int64_t first_tile(const Batch& batch, int b, int group, int tile_rows) {
  return batch.first_row(b) * group / tile_rows + b;
}

/// The splits that a sequence in this order uses.
LONGSPAN_HD inline SplitsTaken splits_taken(const SegmentOrder& order,
                                            const SplitNumbers& numbers) {
  const int total = static_cast<int>(order.total), most = most_of_leaf(order);
  const int bits = log2_ceil(most), filled = fill_of(total, bits + numbers.leaves);
  const int worth = static_cast<int>(numbers.worth >> 4 * filled) & 15;
  const int leaf_splits = worth < bits ? worth : bits;
  const int places = bits - leaf_splits;       // log2 of those of a split
  if (order.interleaved && order.unit == 1) {  // each leaf in turn has a segment more
    const int round = numbers.leaves + places, remainder = total & ((1 << round) - 1);
    const int last = 1 << numbers.leaves;
    return {leaf_splits,
            (total >> round << numbers.leaves) + (remainder < last ? remainder : last)};
  }
  return {leaf_splits, (most + (1 << places) - 1) >> places << numbers.leaves};
}

LONGSPAN_HD inline TileCoord work_of(const Geometry& p, const WorkPlan& plan, int index) {
  const int group = static_cast<int>(plan.by_group.value);
  // With short queries the heads of a key follow each other, since they are adjacent in memory.
  // With long ones tiles follow each other, so that they share keys in L2; the last one comes
  // first, because it has the most work under a causal mask.
  const bool heads_first = plan.lengths != Lengths::only_long;
  const Divisor& fast = heads_first ? plan.by_kv_heads : plan.by_tiles;
  const Divisor& slow = heads_first ? plan.by_tiles : plan.by_kv_heads;
  const int inner = index % fast, remainder = index / fast, outer = remainder % slow;
  const int split = plan.numbers.split(remainder / slow, plan.numbers.leaf_splits);
  TileCoord work{0, heads_first ? inner : outer, split, 0, 0, plan.by_group};
  int tile = plan.tiles - 1 - (heads_first ? outer : inner);
  if (plan.sequence_tiles > 0) {
    work.sequence = tile / plan.by_sequence_tiles;
    tile = tile % plan.by_sequence_tiles;
  } else {
    const auto starts = [&](int b) { return first_tile(p.batch, b, group, plan.tile_rows); };
    work.sequence = last_start(p.batch.size, tile, starts);
    tile -= static_cast<int>(starts(work.sequence));
  }
  const std::int64_t q_len = p.batch.query_len(work.sequence, p.tokens);
  if (tile < 0 || !serves(plan.lengths, q_len)) return work;
  work.first = static_cast<std::int64_t>(tile) * plan.tile_rows;
  const std::int64_t left = q_len * group - work.first;
  work.rows = static_cast<int>(left < 0 ? 0 : left < plan.tile_rows ? left : plan.tile_rows);
  return work;
}

struct PackedRow {
  std::int64_t token;  // of the sequence's on this rank
  int head;
};

LONGSPAN_HD inline PackedRow packed_row(const TileCoord& work, int row) {
  // The packed rows of a sequence are counted by `tiles`, an int.
  const int packed = static_cast<int>(work.first) + row, token = packed / work.by_group;
  const int group = static_cast<int>(work.by_group.value);
  return {token, work.kv_head * group + packed - token * group};
}

/// What the rows of a tile see of this rank's keys.
struct View {
  Interval any;                         // local keys that some row may see; others are not read
  Interval all;                         // local keys that every row sees: no mask is needed there
  const std::int64_t* table = nullptr;  // listed: positions of the local keys
  Interval positions;                   // listed: positions that some row may see

  /// Whether the keys [first, first + count) need no mask.
  LONGSPAN_HD bool full(std::int64_t first, int count) const {
    return first >= all.begin && first + count <= all.end;
  }
};

LONGSPAN_HD inline Interval intersection(const Interval& a, const Interval& b) {
  return {a.begin > b.begin ? a.begin : b.begin, a.end < b.end ? a.end : b.end};
}

/// The positions that the query at `position` sees. Empty intervals are ordered too, so the views
/// of the first and the last row of a run of rows bound those of all rows between.
LONGSPAN_HD inline Interval visible_in_order(const Geometry& p, int b, std::int64_t position,
                                             std::int64_t kv_len) {
  Interval seen = p.visible(b, position, kv_len);
  if (p.documents) {
    // Rows outside of all documents see nothing. Their empty interval must not extend a tile's hull
    // over outside keys, which no row sees.
    const Documents documents = p.documents.for_sequence(b);
    const Interval held = documents.count > 0
                              ? Interval{documents.start[0], documents.start[documents.count]}
                              : Interval{0, 0};
    const auto clamp = [&](std::int64_t x) {
      return x < held.begin ? held.begin : x < held.end ? x : held.end;
    };
    seen = {clamp(seen.begin), clamp(seen.end)};
  }
  return seen;
}

/// What the row of a token sees: local keys, or positions when the shard is listed. If the keys are
/// cut into parts, only those of part `split` count.
LONGSPAN_HD inline Interval row_view(const AttendParams& p, const Sequence& sequence,
                                     std::int64_t token, int split) {
  const std::int64_t position = sequence.context_len + p.query_index(sequence.index, token);
  Interval seen = visible_in_order(p, sequence.index, position, sequence.kv_len);
  if (p.shard.layout == Layout::listed) return seen;
  const Shard shard = p.shard.for_sequence(sequence.index);
  seen.begin = shard.before(seen.begin, sequence.kv_len);
  seen.end = shard.before(seen.end, sequence.kv_len);
  return p.parts ? intersection(seen, p.parts.of(split, sequence.local_len)) : seen;
}

/// Bounds of visible intervals ascend with the row's position, so the views of the first and the
/// last row of a tile give the union and the intersection.
LONGSPAN_HD inline View tile_view(const AttendParams& p, const Sequence& sequence, int split,
                                  const Interval& first, const Interval& last) {
  View view;
  if (p.shard.layout == Layout::listed) {
    view.any = {0, sequence.local_len};
    if (p.parts) view.any = p.parts.of(split, sequence.local_len);
    view.table = p.shard.table;
    view.positions = {first.begin, last.end};
  } else {
    view.any = {first.begin, last.end};
    view.all = {last.begin, first.end};
  }
  return view;
}

/// Whether a row with the view `row` sees this local key. For keys that need a mask.
LONGSPAN_HD inline bool sees(const View& view, const Interval& row, std::int64_t local_key) {
  return view.table == nullptr
             ? row.contains(local_key)
             : view.any.contains(local_key) && row.contains(view.table[local_key]);
}

/// The part of the fixed order's tree that a work tile takes. Parts of the keys take the whole
/// tree, because their views already cut them. `leaf_splits` is that of SplitsTaken.
struct TreeCut {
  int split, splits;
};
LONGSPAN_HD inline TreeCut tree_cut(const AttendParams& p, const WorkPlan& plan,
                                    const TileCoord& work, int leaf_splits) {
  const int skipped = plan.numbers.leaf_splits - leaf_splits;
  return p.parts ? TreeCut{0, 1} : TreeCut{work.split >> skipped, plan.splits >> skipped};
}
LONGSPAN_HD inline TreeCut tree_cut(const AttendParams& p, const WorkPlan& plan,
                                    const TileCoord& work) {
  return tree_cut(p, plan, work, plan.numbers.leaf_splits);
}

/// The row of WorkPlan::parts that holds (sequence, token, head).
LONGSPAN_HD inline std::int64_t part_row(const Geometry& p, const WorkPlan& plan, int sequence,
                                         std::int64_t token, int head) {
  const std::int64_t first = plan.part_tokens > 0 ? std::int64_t{sequence} * plan.part_tokens
                                                  : p.batch.first_row(sequence);
  return (first + token) * p.heads + head;
}

/// The destination of a row's state: the caller's slot, that of the row's part of the keys, or the
/// slot of a split, which fold_parts folds afterwards.
struct Target {
  std::byte* data;  // of the slot
  std::int64_t rows, row;
  int columns;

  LONGSPAN_HD Stats& stats() const { return reinterpret_cast<Stats*>(data)[row]; }
  LONGSPAN_HD float* o() const {
    return reinterpret_cast<float*>(data + StateSlots::stats_bytes(rows)) + row * columns;
  }
};
LONGSPAN_HD inline Target target_of(const AttendParams& p, const WorkPlan& plan,
                                    const Sequence& sequence, const TileCoord& work,
                                    const PackedRow& at) {
  const bool own = plan.splits == 1 || p.parts;
  const StateSlots& slots = own ? p.state : plan.parts;
  const int slot = !own ? work.split : p.parts ? p.slot + work.split : p.slot;
  const std::int64_t row = own ? (sequence.first_row + at.token) * p.heads + at.head
                               : part_row(p, plan, sequence.index, at.token, at.head);
  return {slots.data + slot * slots.slot_bytes(), slots.rows, row, slots.columns()};
}

}  // namespace longspan::kernels::cuda
