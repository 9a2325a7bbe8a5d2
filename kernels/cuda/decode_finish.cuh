// How a piece of decode work ends, by all consumers of the block: the states of its nodes fold to
// the piece's; the pieces of a row tile fold when the last of them is there; and the row's end.
//
//     nodes of a piece      in shared memory
//     pieces of a row tile  in scratch; whoever comes last, by a counter, folds them. More than a
//                           block holds at a time fold in groups, and then the groups
//
// Neighbours fold first throughout, in one tree. The counting is that of NVIDIA's
// threadFenceReduction sample: write, fence, count; whoever counts last, fences and reads.
#pragma once

#include "kernels/cuda/arch/peer.cuh"
#include "kernels/cuda/decode_block.cuh"
#include "kernels/cuda/fold_tree.cuh"
#include "kernels/cuda/row_end.cuh"

namespace longspan::kernels::cuda {

/// Where rows end.
struct DecodeEnd {
  bool finish = false;      // the result, as `merge` says; else the state
  bool wide = false;        // its rows are aligned for eight elements
  int* arrivals = nullptr;  // [works] zeros, and zeros again at the end; where keys are split
  MergeParams merge;
};

namespace decode {

inline constexpr int kColumns = 8;  // of a thread
using Columns = Piece<kColumns>;

__device__ inline void store(float* o, const Columns& x) {
  float4* to = reinterpret_cast<float4*>(o);
  to[0] = make_float4(x.o[0], x.o[1], x.o[2], x.o[3]);
  to[1] = make_float4(x.o[4], x.o[5], x.o[6], x.o[7]);
}

/// States of one row, `stats_stride` and `stride` bytes apart: in shared memory, or in scratch.
struct Source {
  const std::byte* stats;
  const std::byte* o;
  std::int64_t stats_stride, stride;

  /// What other blocks wrote, too: not from the nearest cache.
  __device__ __forceinline__ Columns load(int i) const {
    Columns x;
    const float2 scalars = arch::load_fresh2(stats + i * stats_stride);
    x.stats = {scalars.x, scalars.y};
    const float4 low = arch::load_fresh4(o + i * stride);
    const float4 high = arch::load_fresh4(o + i * stride + sizeof low);
    x.o[0] = low.x, x.o[1] = low.y, x.o[2] = low.z, x.o[3] = low.w;
    x.o[4] = high.x, x.o[5] = high.y, x.o[6] = high.z, x.o[7] = high.w;
    return x;
  }
};

/// The warp's rows of a node, `first` and what follows, from registers.
template <class Traits>
__device__ __forceinline__ void keep_node(DecodeShared<Traits>& shared, int first,
                                          const typename Traits::State& state) {
  const int lane = threadIdx.x % 32;
  __syncwarp();  // other lanes' waiting states were read
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int row = first + lane % 4 * 2 + j;
    if (lane < 4) shared.stats[row] = state.stats[j];
#pragma unroll
    for (int slice = 0; slice < Traits::kSlices; ++slice)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        shared.o[row][slice * 16 + half * 8 + lane / 4] = state.o[slice][half * 2 + j];
  }
}

/// The state of one row of the piece's row tile.
struct TileRow {
  std::int64_t token;  // of the batch
  std::int64_t part;   // row of Plan::parts
  int head;

  __device__ TileRow(const AttendParams& p, const Plan& plan, const DecodePiece& piece, int row) {
    const PackedRow at = packed_row(piece.work, row);
    token = piece.sequence.first_row + at.token;
    part = part_row(p, plan, piece.sequence.index, at.token, at.head);
    head = at.head;
  }
};

__device__ __forceinline__ void end_row(const AttendParams& p, const DecodeEnd& end, int slot,
                                        const TileRow& row, int column, Columns& x, bool is_real) {
  if (end.finish) {
    RowEnd(end.merge, row.head).finish(x);
    if (is_real)
      store_result(end.merge, ResultPlace(end.merge, row.token, row.head, column), x, end.wide);
    return;
  }
  if (!is_real) return;
  const std::int64_t to = row.token * p.heads + row.head;
  if (column == 0) p.state.stats(slot)[to] = x.stats;
  store(p.state.o(slot, to) + column, x);
}

/// True in the block that comes last of `count`.
template <class Traits>
__device__ __forceinline__ bool comes_last(DecodeShared<Traits>& shared, int* arrivals, int count) {
  __threadfence();
  sync_consumers<Traits>();
  if (threadIdx.x == 0) {
    const bool is_last = atomicAdd(arrivals, 1) == count - 1;
    if (is_last) *arrivals = 0;
    shared.is_last = is_last;
  }
  sync_consumers<Traits>();
  if (!shared.is_last) return false;
  __threadfence();
  return true;
}

/// use(row, column, i) for i in [0, count): eight columns of a row of the tile, by one thread.
template <class Traits, class Use>
__device__ __forceinline__ void for_columns(int rows, int dim, int count, const Use& use) {
  constexpr int kVectors = Traits::kDim / kColumns;
  for (int unit = threadIdx.x; unit < rows * kVectors * count; unit += Traits::kConsumers) {
    const int column = unit % kVectors * kColumns, rest = unit / kVectors;
    if (column < dim) use(rest % rows, column, rest / rows);
  }
}

/// The states of all nodes are in shared memory -> the rows' states, or results; stored where it is
/// real. One loop for all
/// that folds here, of up to eight states at a time, so that the code is short: it is read from
/// memory where nothing else is left to do.
template <class Traits>
__device__ __forceinline__ void finish_piece(const AttendParams& p, const Plan& plan,
                                             const DecodeEnd& end, DecodeShared<Traits>& shared,
                                             const DecodePiece& piece, bool is_real) {
  constexpr int kEight = 3;                                // levels of a fold of eight
  constexpr int kStates = Traits::kNodes * Traits::kRows;  // that shared memory holds
  const Work work = piece.work;
  const int rows = work.rows, splits = p.parts ? 1 : piece.splits;
  // Pieces that fold at a time: their eighths must fit into shared memory, and fold at once.
  int most = 8;
  while (most < 64 && most < splits && most / 4 * rows <= kStates) most *= 2;
  int first = work.split, distance = 1;  // of the pieces in the state at hand
  int count = Traits::kNodes, level = 0;
  bool in_shared = true;
  sync_consumers<Traits>();
  for (;;) {
    const int eighths = (count + 7) / 8;
    const bool is_whole = eighths == 1, is_end = is_whole && distance >= splits;
    const int stride =
        in_shared && level == 0 ? Traits::kRows : rows;  // of states in shared memory
    for_columns<Traits>(rows, p.dim, eighths, [&](int row, int column, int eighth) {
      const TileRow at(p, plan, piece, row);
      Source from;
      if (in_shared) {
        from = {reinterpret_cast<const std::byte*>(&shared.stats[eighth * 8 * stride + row]),
                reinterpret_cast<const std::byte*>(&shared.o[eighth * 8 * stride + row][column]),
                stride * static_cast<int>(sizeof(Stats)),
                stride * static_cast<int>(sizeof shared.o[0])};
      } else {
        const int slot = first + eighth * 8 * distance / count;
        from = {reinterpret_cast<const std::byte*>(plan.parts.stats(slot) + at.part),
                reinterpret_cast<const std::byte*>(plan.parts.o(slot, at.part) + column),
                plan.parts.slot_bytes() * (distance / count),
                plan.parts.slot_bytes() * (distance / count)};
      }
      const int here = min(count - eighth * 8, 8);
      Columns x = fold_subtree<kEight>(
          [&](int i) {
            Columns one = from.load(min(i, here - 1));
            if (i >= here) one.stats = empty_stats();
            return one;
          },
          0);
      if (is_end)
        return end_row(p, end, p.slot + (p.parts ? work.split : 0), at, column, x, is_real);
      if (!is_whole) {
        const int state = eighth * rows + row;
        if (column == 0) shared.stats[state] = x.stats;
        return store(&shared.o[state][column], x);
      }
      if (column == 0) plan.parts.stats(first)[at.part] = x.stats;
      store(plan.parts.o(first, at.part) + column, x);
    });
    if (is_end) return;
    if (!is_whole) {
      sync_consumers<Traits>();
      in_shared = true;
      count = eighths;
      continue;
    }
    first &= ~(distance * most - 1);
    count = min(most, (splits - first) / distance);
    if (!comes_last(shared, end.arrivals + piece.arrivals + first + level, count)) return;
    in_shared = false;
    distance *= count;
    ++level;
  }
}

}  // namespace decode
}  // namespace longspan::kernels::cuda
