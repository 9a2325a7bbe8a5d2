// What one thread block works on, and what its rows see. Rows of a kv head's group are packed: row
// r of a sequence is token r / group, head r % group of the group, so that short queries fill a
// tile and a tile of long ones spans few tokens.
//
// Positions ascend with the local key index in every layout but `listed`, so the keys that a row
// may see are an interval of local keys too. It is found once; the loops compare local indices.
#pragma once

#include <cstdint>

#include "kernels/params.hpp"

namespace longspan::kernels::cuda {

/// Sequences of up to so many query tokens take the decode kernel, whatever the batch around them.
inline constexpr int kShortQuery = 16;

/// Which sequences of the batch a launch serves; it skips the others.
enum class Lengths : std::uint8_t { only_short, only_long };

LONGSPAN_HD inline bool serves(Lengths lengths, std::int64_t q_len) {
  return (q_len <= kShortQuery) == (lengths == Lengths::only_short);
}

struct Sequence {
  std::int64_t first_row;  // of q
  std::int64_t q_len;
  std::int64_t kv_len;     // on all ranks
  std::int64_t first_key;  // of k and v
  std::int64_t local_len;  // keys on this rank
};

LONGSPAN_HD inline Sequence sequence_of(const AttendParams& p, int b) {
  const std::int64_t kv_len = p.batch.keys(b, p.shard);
  return {p.batch.first_row(b), p.batch.query_len(b, p.tokens), kv_len, p.batch.first_key(b),
          p.shard.local_len(kv_len)};
}

/// How a launch cuts its work: row tiles x splits of the keys x kv heads.
struct Plan {
  Lengths lengths = Lengths::only_long;
  int tile_rows = 1;   // packed rows in a tile
  int tiles = 1;       // short: in a sequence; long: in the batch, an upper bound
  int splits = 1;      // a power of two; each takes an aligned part of the fixed order's tree
  int works = 0;       // pieces of work; some turn out to be empty
  int depth = 0;       // of the fixed order's stack
  float* stack = nullptr;  // [blocks, depth, floats of a block]; see FoldStack
  StateSlots parts;        // splits > 1: [splits] slots of rows part_row(...)
  int part_tokens = 0;     // rows of a sequence in `parts`, in tokens
};

/// One thread block's piece.
struct Work {
  int sequence;
  int kv_head;
  int split;
  std::int64_t first;  // packed row
  int rows;            // packed rows; 0: nothing to do
};

/// First tile of sequence b where tiles are numbered over the batch with at most one gap a
/// sequence: it can be had, and searched, without a prefix sum.
LONGSPAN_HD inline std::int64_t first_tile(const Batch& batch, int b, int group, int tile_rows) {
  return batch.first_row(b) * group / tile_rows + b;
}

LONGSPAN_HD inline Work work_of(const AttendParams& p, const Plan& plan, int index) {
  const int group = p.heads / p.kv_heads;
  int tile = index % plan.tiles;
  int rest = index / plan.tiles;
  Work work{0, rest % p.kv_heads, 0, 0, 0};
  rest /= p.kv_heads;
  if (plan.lengths == Lengths::only_short) {
    work.split = rest % plan.splits;
    work.sequence = rest / plan.splits;
  } else {
    tile = plan.tiles - 1 - tile;  // under a causal mask the last tiles are the heaviest
    int low = 0, high = p.batch.size;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (first_tile(p.batch, middle, group, plan.tile_rows) <= tile ? low : high) = middle;
    }
    work.sequence = low;
    tile -= static_cast<int>(first_tile(p.batch, low, group, plan.tile_rows));
  }
  const std::int64_t q_len = p.batch.query_len(work.sequence, p.tokens);
  if (tile < 0 || !serves(plan.lengths, q_len)) return work;
  work.first = static_cast<std::int64_t>(tile) * plan.tile_rows;
  const std::int64_t rest_rows = q_len * group - work.first;
  work.rows = static_cast<int>(
      rest_rows < 0 ? 0 : rest_rows < plan.tile_rows ? rest_rows : plan.tile_rows);
  return work;
}

struct PackedRow {
  std::int64_t token;  // of the sequence
  int head;
};

LONGSPAN_HD inline PackedRow packed_row(const AttendParams& p, const Work& work, int row) {
  const unsigned group = static_cast<unsigned>(p.heads / p.kv_heads);
  // 32-bit division: the packed rows of a sequence are counted by `tiles`, an int.
  const unsigned packed = static_cast<unsigned>(work.first + row);
  return {packed / group, work.kv_head * static_cast<int>(group) + static_cast<int>(packed % group)};
}

/// Number of this rank's keys that stand at positions below `position`.
LONGSPAN_HD inline std::int64_t keys_below(const Shard& shard, std::int64_t position,
                                           std::int64_t kv_len) {
  if (position <= 0) return 0;
  if (position > kv_len) position = kv_len;
  if (shard.layout == Layout::striped || shard.layout == Layout::interleaved)
    return shard.local_len(position);  // such a shard of a prefix is a prefix of the shard
  std::int64_t low = 0, high = shard.local_len(kv_len);
  if (shard.layout == Layout::contiguous || shard.layout == Layout::ranges) {
    const std::int64_t below = position - shard.position(0, kv_len);
    return below < low ? low : below > high ? high : below;
  }
  while (low < high) {
    const std::int64_t middle = (low + high) / 2;
    if (shard.position(middle, kv_len) < position)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

/// What a row tile sees of this rank's keys.
struct View {
  Interval any;  // local keys that some row may see; others are not read
  Interval all;  // local keys that every row sees: no mask is needed there
  const std::int64_t* table = nullptr;  // listed: positions of the local keys
  Interval positions;                   // listed: positions that some row may see

  /// True when the keys [first, first + count) need no mask.
  LONGSPAN_HD bool full(std::int64_t first, int count) const {
    return first >= all.begin && first + count <= all.end;
  }
};

/// What packed row `row` sees: local keys, or positions when the shard is listed.
LONGSPAN_HD inline Interval row_view(const AttendParams& p, const Sequence& sequence,
                                     std::int64_t token) {
  const Interval seen =
      p.mask.visible(sequence.kv_len - sequence.q_len + token, sequence.kv_len);
  if (p.shard.layout == Layout::listed) return seen;
  return {keys_below(p.shard, seen.begin, sequence.kv_len),
          keys_below(p.shard, seen.end, sequence.kv_len)};
}

/// Bounds of visible intervals ascend with the row's position, so the first and the last token of a
/// tile give the union and the intersection.
LONGSPAN_HD inline View tile_view(const AttendParams& p, const Sequence& sequence,
                                  const Work& work) {
  const Interval first = row_view(p, sequence, packed_row(p, work, 0).token);
  const Interval last = row_view(p, sequence, packed_row(p, work, work.rows - 1).token);
  View view;
  if (p.shard.layout == Layout::listed) {
    view.any = {0, sequence.local_len};
    view.all = {0, 0};
    view.table = p.shard.table;
    view.positions = {first.begin, last.end};
  } else {
    view.any = {first.begin, last.end};
    view.all = {last.begin, first.end};
  }
  return view;
}

/// Row of Plan::parts that holds (sequence, token, head).
LONGSPAN_HD inline std::int64_t part_row(const AttendParams& p, const Plan& plan, int sequence,
                                         std::int64_t token, int head) {
  return (static_cast<std::int64_t>(sequence) * plan.part_tokens + token) * p.heads + head;
}

}  // namespace longspan::kernels::cuda
