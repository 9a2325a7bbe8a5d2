// Attention of short queries, where reading the keys is the work. Keys are the long side of every
// product, so that a group's few rows waste nothing:
//
//     S^T = K Q^T   (a warp: 16 keys of each chunk, all rows)
//     O^T = V^T P^T (a warp: its slices of dim, all keys and rows)
//
// P passes from one form to the other through shared memory. Chunks of 64 keys, K K V V for each
// segment of 128, stream through a ring of cp.async stages with one barrier a chunk. A segment's
// state is small; segments fold in the fixed order, always. A block takes an aligned part of the
// order's tree (a split), so the number of splits fills the GPU and never changes a bit.
#pragma once

#include "kernels/cuda/attend.hpp"
#include "kernels/cuda/fold_stack.cuh"
#include "kernels/cuda/tile.cuh"
#include "kernels/cuda/view.cuh"

namespace longspan::kernels::cuda {

// ---- traits ---------------------------------------------------------------------------------

template <class T, int kHeadDim, int kRowCount>
struct DecodeTraits {
  using Element = T;
  static constexpr int kDim = kHeadDim;
  static constexpr int kRows = kRowCount;  // packed rows: 8, 16 or 32
  static constexpr int kRowTiles = kRows / 8;
  static constexpr int kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kKeys = 64;   // in a chunk
  static constexpr int kChunks = 4;  // of a segment: K K V V
  // As many stages as let two blocks share a multiprocessor of 227 KB.
  static constexpr int kStages = kDim <= 64    ? 8
                                 : kDim <= 128 ? (kRows == 8 ? 6 : 5)
                                 : kDim <= 192 ? 4
                                               : 3;
  static constexpr int kAhead = kStages - 1;                         // chunks under way
  static constexpr int kSlices = (kDim / 16 + kWarps - 1) / kWarps;  // m16 slices of dim of a warp
  static_assert(kKeys == 16 * kWarps && kSegment == 2 * kKeys);

  static constexpr int kChunkBytes = kKeys * kDim * 2;
  static constexpr int kQueryBytes = kRows * kDim * 2;
  static constexpr int kWeightStride = kSegment + 8;  // of a row of P: shifts each row by a bank
  static constexpr int kWeightBytes = kRows * kWeightStride * 2;
  static constexpr int kStatsBytes = 2 * kWarps * kRows * 4;
  static constexpr int kSharedBytes = kStages * kChunkBytes + kQueryBytes + kWeightBytes +
                                      kStatsBytes + kRows * static_cast<int>(sizeof(Interval)) + 16;

  struct RowOf {  // quad = slice * kRowTiles + row tile; rows 2t, 2t + 1 of each row tile
    __device__ static constexpr int row(int quad, int i) { return quad % kRowTiles * 2 + i % 2; }
  };
  using State = ThreadState<2 * kRowTiles, kSlices * kRowTiles, RowOf>;
  using Stack = FoldStack<State, kThreads, kRows == 8>;
};

/// Shared memory of a block, in the order of alignment.
template <class Traits>
struct DecodeShared {
  std::uint32_t ring;                 // [kStages] chunks
  std::uint32_t queries;              // tile [kRows, kDim]
  typename Traits::Element* weights;  // P [kRows, kWeightStride]
  float* top;                         // [kWarps, kRows] maxima of the warps' keys
  float* sum;                         // [kWarps, kRows]
  Interval* views;                    // [kRows]
  int* index;                         // of the next piece of work

  __device__ explicit DecodeShared(std::byte* memory) {
    ring = arch::shared_address(memory);
    queries = ring + Traits::kStages * Traits::kChunkBytes;
    memory += Traits::kStages * Traits::kChunkBytes + Traits::kQueryBytes;
    views = reinterpret_cast<Interval*>(memory);
    memory += Traits::kRows * sizeof(Interval);
    top = reinterpret_cast<float*>(memory);
    sum = top + Traits::kWarps * Traits::kRows;
    weights = reinterpret_cast<typename Traits::Element*>(sum + Traits::kWarps * Traits::kRows);
    index = reinterpret_cast<int*>(weights + Traits::kRows * Traits::kWeightStride);
  }
};

// ---- steps ----------------------------------------------------------------------------------

/// The segments that are loaded or in work: the one in work and the next two.
struct SegmentQueue {
  struct Entry {
    std::int64_t place;
    std::int64_t segment;  // < 0: none
  };
  Entry entry[3];

  __device__ static Entry take(SegmentWalk& walk) {
    if (!walk.next()) return {0, -1};
    return {walk.place, walk.segment};
  }
  __device__ explicit SegmentQueue(SegmentWalk& walk) : entry{take(walk), {0, -1}, {0, -1}} {
    if (entry[0].segment >= 0) entry[1] = take(walk);
    if (entry[1].segment >= 0) entry[2] = take(walk);
  }
  __device__ void step(SegmentWalk& walk) {
    entry[0] = entry[1];
    entry[1] = entry[2];
    if (entry[1].segment >= 0) entry[2] = take(walk);
  }
};

/// s += K Q^T for one chunk: the warp's 16 keys, all rows.
template <class Traits>
__device__ inline void multiply_chunk_keys(float (&s)[Traits::kRowTiles][4], std::uint32_t keys,
                                           std::uint32_t queries) {
  using T = typename Traits::Element;
  using Layout = Tile<T, Traits::kDim>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int k = 0; k < Traits::kDim / 16; k += 2) {
    std::uint32_t a[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      arch::load_matrices(a[half],
                          keys + Layout::offset(warp * 16 + lane % 16, 2 * (k + half) + lane / 16));
#pragma unroll
    for (int n = 0; n < Traits::kRowTiles; ++n) {
      std::uint32_t b[4];  // dims 16 k ... 16 k + 31 of eight rows
      arch::load_matrices(b, queries + Layout::offset(n * 8 + lane % 8, 2 * k + lane / 8));
      arch::mma<T>(s[n], a[0], b[0], b[1]);
      arch::mma<T>(s[n], a[1], b[2], b[3]);
    }
  }
}

/// Products -> scores in base 2; -inf where the row does not see the key.
template <class Traits>
__device__ inline void score_segment(float (&s)[2][Traits::kRowTiles][4], const AttendParams& p,
                                     const Interval* views, const View& view,
                                     std::int64_t local_len, std::int64_t first) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool full = view.full(first, kSegment);
#pragma unroll
  for (int c = 0; c < 2; ++c)
#pragma unroll
    for (int n = 0; n < Traits::kRowTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[c][n][i] = p.score(s[c][n][i]);
  if (full) return;
#pragma unroll
  for (int n = 0; n < Traits::kRowTiles; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const Interval row = views[n * 8 + lane % 4 * 2 + j];
#pragma unroll
      for (int c = 0; c < 2; ++c)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const std::int64_t key = first + c * Traits::kKeys + warp * 16 + half * 8 + lane / 4;
          const bool seen = view.table == nullptr
                                ? row.contains(key)
                                : key < local_len && row.contains(view.table[key]);
          if (!seen) s[c][n][half * 2 + j] = -infinity();
        }
    }
}

/// Scores -> P in shared memory, and the segment's maxima and sums in `stats`. Lanes, then warps,
/// in one order.
template <class Traits>
__device__ inline void weigh_segment(float (&s)[2][Traits::kRowTiles][4],
                                     const DecodeShared<Traits>& shared,
                                     Stats (&stats)[2 * Traits::kRowTiles]) {
  using T = typename Traits::Element;
  constexpr int kRows = Traits::kRows;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto row_of = [&](int n, int j) { return n * 8 + lane % 4 * 2 + j; };
#pragma unroll
  for (int n = 0; n < Traits::kRowTiles; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float top = fmaxf(fmaxf(s[0][n][j], s[0][n][2 + j]), fmaxf(s[1][n][j], s[1][n][2 + j]));
#pragma unroll
      for (int step = 4; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
      if (lane < 4) shared.top[warp * kRows + row_of(n, j)] = top;
    }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < Traits::kRowTiles; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = row_of(n, j);
      float top = shared.top[row];
#pragma unroll
      for (int w = 1; w < Traits::kWarps; ++w) top = fmaxf(top, shared.top[w * kRows + row]);
      stats[2 * n + j].max = top;
      const float from = top == -infinity() ? 0.0f : top;  // nothing visible: P = 0
      float sum = 0.0f;
#pragma unroll
      for (int c = 0; c < 2; ++c)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float weight = arch::exp2_fast(__fadd_rn(s[c][n][half * 2 + j], -from));
          sum = __fadd_rn(sum, weight);
          shared.weights[row * Traits::kWeightStride + c * Traits::kKeys + warp * 16 + half * 8 +
                         lane / 4] = static_cast<T>(weight);
        }
#pragma unroll
      for (int step = 4; step < 32; step *= 2)
        sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, step));
      if (lane < 4) shared.sum[warp * kRows + row] = sum;
    }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < Traits::kRowTiles; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float* sum = shared.sum + row_of(n, j);
      static_assert(Traits::kWarps == 4);
      stats[2 * n + j].sum =
          __fadd_rn(__fadd_rn(sum[0], sum[kRows]), __fadd_rn(sum[2 * kRows], sum[3 * kRows]));
    }
}

/// O^T += V^T P^T for chunk `chunk` (0 or 1) of the segment: the warp's slices of dim.
template <class Traits>
__device__ inline void multiply_chunk_values(typename Traits::State& state, std::uint32_t values,
                                             std::uint32_t weights, int chunk) {
  using T = typename Traits::Element;
  using Layout = Tile<T, Traits::kDim>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int k = 0; k < Traits::kKeys / 16; k += 2) {
    std::uint32_t b[Traits::kRowTiles][4];  // keys 16 k ... 16 k + 31 of eight rows
#pragma unroll
    for (int n = 0; n < Traits::kRowTiles; ++n)
      arch::load_matrices(b[n], weights + ((n * 8 + lane % 8) * Traits::kWeightStride +
                                           chunk * Traits::kKeys + k * 16 + lane / 8 * 8) *
                                              2);
#pragma unroll
    for (int slice = 0; slice < Traits::kSlices; ++slice) {
      const int m = warp + slice * Traits::kWarps;
      if (Traits::kDim / 16 % Traits::kWarps != 0 && m >= Traits::kDim / 16) break;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        std::uint32_t a[4];
        arch::load_matrices_transposed(
            a, values + Layout::offset((k + half) * 16 + lane % 8 + lane / 16 * 8,
                                       2 * m + lane / 8 % 2));
#pragma unroll
        for (int n = 0; n < Traits::kRowTiles; ++n)
          arch::mma<T>(state.o[slice * Traits::kRowTiles + n], a, b[n][2 * half],
                       b[n][2 * half + 1]);
      }
    }
  }
}

/// One split: straight into the caller's slot; several: into the split's slot of plan.parts.
template <class Traits>
__device__ inline void store_columns(const AttendParams& p, const Plan& plan,
                                     const Sequence& sequence, const Work& work,
                                     const typename Traits::State& state) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const StateSlots& slots = plan.splits == 1 ? p.state : plan.parts;
  const int slot = plan.splits == 1 ? p.slot : work.split;
#pragma unroll
  for (int n = 0; n < Traits::kRowTiles; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = n * 8 + lane % 4 * 2 + j;
      if (row >= work.rows) continue;
      const PackedRow at = packed_row(p, work, row);
      const std::int64_t to = plan.splits == 1
                                  ? (sequence.first_row + at.token) * p.heads + at.head
                                  : part_row(p, plan, work.sequence, at.token, at.head);
      if (threadIdx.x < 4) slots.stats(slot)[to] = state.stats[2 * n + j];
      float* o = slots.o(slot, to);
#pragma unroll
      for (int slice = 0; slice < Traits::kSlices; ++slice)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int d = (warp + slice * Traits::kWarps) * 16 + half * 8 + lane / 4;
          if (d < p.dim) o[d] = state.o[slice * Traits::kRowTiles + n][half * 2 + j];
        }
    }
}

// ---- the kernel -----------------------------------------------------------------------------

template <class Traits>
__global__ __launch_bounds__(Traits::kThreads,
                             2) void attend_decode_kernel(const __grid_constant__ AttendParams p,
                                                          const __grid_constant__ Plan plan) {
  using T = typename Traits::Element;
  extern __shared__ __align__(128) std::byte memory[];
  const DecodeShared<Traits> shared(memory);
  const std::uint32_t weights = arch::shared_address(shared.weights);

  for (int index = blockIdx.x; index < plan.works; index = next_work(plan, index, shared.index)) {
    const Work work = work_of(p, plan, index);
    if (work.rows == 0) continue;
    const Sequence sequence = sequence_of(p, work.sequence);
    __syncthreads();  // the last piece of work is done with shared memory
    load_queries<T, Traits::kDim, Traits::kRows, Traits::kThreads>(shared.queries, p, sequence,
                                                                   work);
    if (threadIdx.x < Traits::kRows) {
      const int row = min(static_cast<int>(threadIdx.x), work.rows - 1);
      shared.views[threadIdx.x] = row_view(p, sequence, packed_row(p, work, row).token);
    }
    __syncthreads();
    const View view =
        tile_view(p.shard, sequence, shared.views[0], shared.views[Traits::kRows - 1]);
    SegmentWalk walk(p.shard.order(sequence.kv_len), view.any, work.split, plan.splits);
    SegmentQueue queue(walk);
    int stage = 0;  // of the chunk in work
    /// Queues chunk `chunk` (counted from the first of the segment in work) into the stage that it
    /// takes in turn. The group is committed even when it is empty: waiting counts groups.
    const auto load = [&](int chunk) {
      const std::int64_t segment = queue.entry[chunk / Traits::kChunks].segment;
      if (segment >= 0) {
        const int kind = chunk % Traits::kChunks;
        int to = stage + Traits::kAhead;
        if (to >= Traits::kStages) to -= Traits::kStages;
        load_keys<T, Traits::kDim, Traits::kKeys, Traits::kThreads>(
            shared.ring + to * Traits::kChunkBytes, kind < 2 ? p.k : p.v, work.kv_head, p.dim,
            sequence, view, segment * kSegment + kind % 2 * Traits::kKeys);
      }
      arch::commit_copies();
    };
    /// The chunk in work is there; the stage before it is free and takes the next chunk.
    const auto advance = [&](int chunk) {
      arch::wait_copies<Traits::kAhead - 1>();
      __syncthreads();
      load(chunk + Traits::kAhead);
      const std::uint32_t ready = shared.ring + stage * Traits::kChunkBytes;
      if (++stage == Traits::kStages) stage = 0;
      return ready;
    };
    stage = 1;
#pragma unroll
    for (int chunk = 0; chunk < Traits::kAhead; ++chunk) {
      load(chunk);  // into stages 0, 1, ...: stage + kAhead wraps to stage - 1
      if (++stage == Traits::kStages) stage = 0;
    }
    stage = 0;

    typename Traits::State state;
    state.clear();
    typename Traits::Stack stack(plan.stack, plan.depth);
    while (queue.entry[0].segment >= 0) {
      const std::int64_t first = queue.entry[0].segment * kSegment;
      float s[2][Traits::kRowTiles][4] = {};
#pragma unroll
      for (int chunk = 0; chunk < 2; ++chunk)
        multiply_chunk_keys<Traits>(s[chunk], advance(chunk), shared.queries);
      score_segment<Traits>(s, p, shared.views, view, sequence.local_len, first);
      state.clear();
      weigh_segment<Traits>(s, shared, state.stats);
#pragma unroll
      for (int chunk = 0; chunk < 2; ++chunk)
        multiply_chunk_values<Traits>(state, advance(2 + chunk), weights, chunk);
      if (queue.entry[1].segment >= 0)
        stack.finish_subtree(state, finished_level(queue.entry[0].place, queue.entry[1].place));
      queue.step(walk);
    }
    stack.fold_all(state);
    arch::wait_copies<0>();
    store_columns<Traits>(p, plan, sequence, work, state);
  }
}

template <class T, int kDim, int kRows>
KernelShape decode_shape() {
  using Traits = DecodeTraits<T, kDim, kRows>;
  return {reinterpret_cast<const void*>(&attend_decode_kernel<Traits>), Traits::kThreads,
          Traits::kSharedBytes, kRows, Traits::Stack::kStateBytes};
}

}  // namespace longspan::kernels::cuda
