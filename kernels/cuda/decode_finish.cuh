// How a piece of decode work ends, by all consumers of the block: the states of its nodes fold to
// the piece's; the pieces of a row tile fold when the last of them is there; and the row's end.
//
//     nodes of a piece      in shared memory
//     pieces of a row tile  in scratch; whoever comes last, by a counter, folds them. More than a
//                           block holds at a time fold in groups, and then the groups
//
// Neighbours fold first throughout, in one tree. The counting is that of NVIDIA's threadFenceReduction
// sample: write, fence, count; whoever counts last, fences and reads.
#pragma once

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

__device__ inline void set(Columns& x, const float4& low, const float4& high) {
  const float o[kColumns] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < kColumns; ++i) x.o[i] = o[i];
}

__device__ inline void store(float* o, const Columns& x) {
  float4* to = reinterpret_cast<float4*>(o);
  to[0] = make_float4(x.o[0], x.o[1], x.o[2], x.o[3]);
  to[1] = make_float4(x.o[4], x.o[5], x.o[6], x.o[7]);
}

/// What other blocks wrote: not from the nearest cache.
__device__ inline Columns load_written(const Stats* stats, const float* o) {
  Columns x;
  const float2 scalars = __ldcg(reinterpret_cast<const float2*>(stats));
  x.stats = {scalars.x, scalars.y};
  const float4* from = reinterpret_cast<const float4*>(o);
  set(x, __ldcg(from), __ldcg(from + 1));
  return x;
}

template <class Traits>
__device__ inline Columns load_shared(const DecodeShared<Traits>& shared, int state, int column) {
  Columns x;
  x.stats = shared.stats[state];
  const float4* from = reinterpret_cast<const float4*>(&shared.o[state][column]);
  set(x, from[0], from[1]);
  return x;
}

template <class Traits>
__device__ inline void store_shared(DecodeShared<Traits>& shared, int state, int column,
                                    const Columns& x) {
  if (column == 0) shared.stats[state] = x.stats;
  store(&shared.o[state][column], x);
}

/// The warp's rows of a node, from registers.
template <class Traits>
__device__ __forceinline__ void keep_node(DecodeShared<Traits>& shared, int node,
                                          const typename Traits::State& state) {
  const int lane = threadIdx.x % 32;
  const int first = DecodeShared<Traits>::row_of(node);
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
                                        const TileRow& row, int column, Columns& x) {
  if (end.finish) {
    RowEnd(end.merge, row.head).finish(x);
    store_result(end.merge, ResultPlace(end.merge, row.token, row.head, column), x, end.wide);
    return;
  }
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

/// The states of all nodes are in shared memory -> the rows' states, or results.
template <class Traits>
__device__ __forceinline__ void finish_piece(const AttendParams& p, const Plan& plan,
                                             const DecodeEnd& end, DecodeShared<Traits>& shared,
                                             const DecodePiece& piece) {
  constexpr int kEight = 3;  // levels that a thread folds at a time
  constexpr int kStates = Traits::kNodes * Traits::kRows;  // that shared memory holds
  const Work work = piece.work;
  const int splits = piece.splits, rows = work.rows;
  const bool split = splits > 1 && !p.parts;
  sync_consumers<Traits>();
  for_columns<Traits>(rows, p.dim, 1, [&](int row, int column, int) {
    Columns x = fold_subtree<log2_ceil(Traits::kNodes)>(
        [&](int node) { return load_shared(shared, node * Traits::kRows + row, column); }, 0);
    const TileRow at(p, plan, piece, row);
    if (!split) return end_row(p, end, p.slot + (p.parts ? work.split : 0), at, column, x);
    if (column == 0) plan.parts.stats(work.split)[at.part] = x.stats;
    store(plan.parts.o(work.split, at.part) + column, x);
  });
  if (!split) return;
  // Pieces `distance` apart fold, so many that their eighths fit into shared memory.
  int most = 8;
  while (2 * most / 8 * rows <= kStates && most < splits) most *= 2;
  int* arrivals = end.arrivals + piece.arrivals;
  for (int distance = 1, level = 0; distance < splits; ++level) {
    const int first = work.split & ~(distance * most - 1);
    const int count = min(most, (splits - first) / distance);  // powers of two
    if (!comes_last(shared, arrivals + first + level, count)) return;
    const int parts = max(count / 8, 1);
    const bool is_end = distance * count == splits;
    for_columns<Traits>(rows, p.dim, parts, [&](int row, int column, int part) {
      const TileRow at(p, plan, piece, row);
      const Columns x = fold_subtree<kEight>(
          [&](int i) {
            const int slot = first + (part * 8 + min(i, count - 1)) * distance;
            Columns one = load_written(plan.parts.stats(slot) + at.part,
                                       plan.parts.o(slot, at.part) + column);
            if (i >= count) one.stats = empty_stats();
            return one;
          },
          0);
      store_shared(shared, part * rows + row, column, x);
    });
    for (int half = 1; half < parts; half *= 2) {
      sync_consumers<Traits>();
      for_columns<Traits>(rows, p.dim, parts / (2 * half), [&](int row, int column, int pair) {
        const int older = 2 * half * pair * rows + row;
        Columns x = load_shared(shared, older + half * rows, column);
        merge_pieces(load_shared(shared, older, column), x);
        store_shared(shared, older, column, x);
      });
    }
    sync_consumers<Traits>();
    for_columns<Traits>(rows, p.dim, 1, [&](int row, int column, int) {
      Columns x = load_shared(shared, row, column);
      const TileRow at(p, plan, piece, row);
      if (is_end) return end_row(p, end, p.slot, at, column, x);
      if (column == 0) plan.parts.stats(first)[at.part] = x.stats;
      store(plan.parts.o(first, at.part) + column, x);
    });
    distance *= count;
  }
}

}  // namespace decode
}  // namespace longspan::kernels::cuda
