// Attention of fp32 tensors with products of tf32 (AttendParams::tf32): mma.sync on factors rounded
// to 10 bits of mantissa, fp32 sums; scores, weights' sums and states stay fp32.
//
//     S = tf32(Q) tf32(K)^T,   P = exp2(S - max S),   O = tf32(P) tf32(V)
//
// A block holds 64 packed rows, a warp 16 of them with all 128 keys of a segment. The sum over keys
// may take them in any order, so slot t of a P V step is key 2t and slot t + 4 is key 2t + 1: the
// accumulators of S are then the fragments of P as they stand, and P never leaves the registers.
// Always in the fixed order. One instance of each dim, with the loaders of attend_fp32.cuh that
// take pages of any layout, fp8, scales and biases.
#pragma once

#include "kernels/cuda/arch/shared.cuh"
#include "kernels/cuda/arch/sm80.cuh"
#include "kernels/cuda/arch/tf32.cuh"
#include "kernels/cuda/common/bias.cuh"
#include "kernels/cuda/common/fold_stack.cuh"
#include "kernels/cuda/common/next_work.cuh"
#include "kernels/cuda/common/store_state.cuh"
#include "kernels/cuda/common/view.cuh"
#include "kernels/cuda/portable/attend_fp32.cuh"
#include "kernels/cuda/portable/attend_tf32.hpp"

namespace longspan::kernels::cuda {

// ---- traits ---------------------------------------------------------------------------------

template <int kHeadDim>
struct Tf32Traits {
  static constexpr int kDim = kHeadDim;
  static constexpr bool kPlain = false;  // of the loaders
  static constexpr int kThreads = 128;
  static constexpr int kRows = 64;                     // 16 of a warp
  static constexpr int kKeyTiles = kSegment / 8;       // n8 tiles of S
  static constexpr int kDimTiles = kDim / 8;           // n8 tiles of O
  static constexpr int kBlocks = kDim <= 128 ? 2 : 1;  // on a multiprocessor
  static constexpr int kSliceDims = 64;                // of K, loaded at a time
  static constexpr int kSliceKeys = 64;                // of V
  // A stride of 4 modulo 32 banks: rows g and columns t of a fragment meet in no bank, nor do V's
  // rows 2t and columns g.
  static constexpr int kQueryStride = kDim + 4;
  static constexpr int kKeyStride = kSliceDims + 4;
  static constexpr int kValueStride = kDim + 4;

  static constexpr int kSliceFloats = kSegment * kKeyStride > kSliceKeys* kValueStride
                                          ? kSegment* kKeyStride
                                          : kSliceKeys* kValueStride;
  static constexpr int kSharedBytes = 4 * (kRows * kQueryStride + kSliceFloats + kSegment) +
                                      kRows * static_cast<int>(sizeof(Interval)) + 16;

  struct RowOf {
    __device__ static constexpr int row(int, int i) { return i / 2; }
  };
  using State = ThreadState<2, kDimTiles, RowOf>;
  using Stack = FoldStack<State, kThreads>;
};

// ---- steps ----------------------------------------------------------------------------------
// Lane 4 g + t of a warp; its rows are g and g + 8 of the warp's 16.

/// s += Q K^T over one slice of dims. `queries`: the warp's rows, at the slice's first dim.
template <class Traits>
__device__ inline void multiply_slice_tf32(float (&s)[Traits::kKeyTiles][4], const float* queries,
                                           const float* keys) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const float* q = queries + g * Traits::kQueryStride + t;
  const float* k = keys + g * Traits::kKeyStride + t;
#pragma unroll
  for (int d = 0; d < Traits::kSliceDims; d += 8) {
    const std::uint32_t a[4] = {arch::to_tf32(q[d]), arch::to_tf32(q[d + 8 * Traits::kQueryStride]),
                                arch::to_tf32(q[d + 4]),
                                arch::to_tf32(q[d + 4 + 8 * Traits::kQueryStride])};
#pragma unroll
    for (int n = 0; n < Traits::kKeyTiles; ++n) {
      const float* column = k + n * 8 * Traits::kKeyStride + d;
      arch::mma_tf32(s[n], a, arch::to_tf32(column[0]), arch::to_tf32(column[4]));
    }
  }
}

/// Products -> P, in place; maxima and sums into the state. `columns`: of the segment's keys.
template <class Traits>
__device__ inline void weigh_rows_tf32(float (&s)[Traits::kKeyTiles][4], const AttendParams& p,
                                       const Work& work, const Interval* views, const View& view,
                                       std::int64_t first, const int* columns,
                                       typename Traits::State& state) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const Score score{p.scale(work.kv_head), p.score.softcap};
#pragma unroll
  for (int n = 0; n < Traits::kKeyTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) s[n][i] = score(s[n][i]);

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = static_cast<int>(threadIdx.x) / 32 * 16 + half * 8 + g;
    if (p.bias) {
      const PackedRow at = packed_row(work, min(row, work.rows - 1));
      const RowBias bias(p.bias, query_row(p, work.sequence, at));
#pragma unroll
      for (int n = 0; n < Traits::kKeyTiles; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int column = columns[n * 8 + 2 * t + j];
          float& x = s[n][2 * half + j];
          x = RowBias::add(x, bias.alibi(column) + bias.qq(column));
        }
    }
    if (!view.full(first, kSegment)) {
      const Interval seen_by_row = views[row];
#pragma unroll
      for (int n = 0; n < Traits::kKeyTiles; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j)
          if (!sees(view, seen_by_row, first + n * 8 + 2 * t + j)) s[n][2 * half + j] = -infinity();
    }
    float top = -infinity();
#pragma unroll
    for (int n = 0; n < Traits::kKeyTiles; ++n)
      top = fmaxf(top, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    const float from = top == -infinity() ? 0.0f : top;  // nothing visible: P = 0
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < Traits::kKeyTiles; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& x = s[n][2 * half + j];
        x = arch::exp2_fast(__fadd_rn(x, -from));
        sum = __fadd_rn(sum, x);
      }
    sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 1));
    sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 2));
    state.stats[half] = {top, sum};
  }
}

/// O += P V over one slice of keys, whose P are the first of `s`; the next slice's move there, so
/// that one piece of code serves all slices.
template <class Traits>
__device__ inline void accumulate_slice_tf32(typename Traits::State& state,
                                             float (&s)[Traits::kKeyTiles][4],
                                             const float* values) {
  constexpr int kTiles = Traits::kSliceKeys / 8;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const float* v = values + 2 * t * Traits::kValueStride + g;
#pragma unroll
  for (int k = 0; k < kTiles; ++k) {
    const std::uint32_t a[4] = {arch::to_tf32(s[k][0]), arch::to_tf32(s[k][2]),
                                arch::to_tf32(s[k][1]), arch::to_tf32(s[k][3])};
#pragma unroll
    for (int n = 0; n < Traits::kDimTiles; ++n) {
      const float* pair = v + k * 8 * Traits::kValueStride + n * 8;
      arch::mma_tf32(state.o[n], a, arch::to_tf32(pair[0]),
                     arch::to_tf32(pair[Traits::kValueStride]));
    }
  }
#pragma unroll
  for (int k = 0; k + kTiles < Traits::kKeyTiles; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) s[k][i] = s[k + kTiles][i];
}

template <class Traits>
__device__ inline void store_tf32(const AttendParams& p, const Plan& plan, const Sequence& sequence,
                                  const Work& work, const typename Traits::State& state) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = static_cast<int>(threadIdx.x) / 32 * 16 + half * 8 + g;
    if (row >= work.rows) continue;
    const Target to = target_of(p, plan, sequence, work, packed_row(work, row));
    const RowStore<4> store(p, to, state.stats[half]);
#pragma unroll
    for (int n = 0; n < Traits::kDimTiles; ++n) {
      if (n * 8 >= p.value_dim) break;
      store(n * 8 + 2 * t, make_float2(state.o[n][2 * half], state.o[n][2 * half + 1]));
    }
  }
}

// ---- the kernel -----------------------------------------------------------------------------

template <class Traits>
__global__ __launch_bounds__(Traits::kThreads, Traits::kBlocks) void attend_tf32_kernel(
    const __grid_constant__ AttendParams p, const __grid_constant__ Plan plan) {
  std::byte* const memory = arch::shared_by_128;
  float* queries = reinterpret_cast<float*>(memory);
  float* slice = queries + Traits::kRows * Traits::kQueryStride;
  int* columns = reinterpret_cast<int*>(slice + Traits::kSliceFloats);
  Interval* views = reinterpret_cast<Interval*>(columns + kSegment);
  int* next_index = reinterpret_cast<int*>(views + Traits::kRows);
  const int first_row = static_cast<int>(threadIdx.x) / 32 * 16;  // of the warp

  for (int index = blockIdx.x; index < plan.works; index = next_work(plan, index, next_index)) {
    const Work work = work_of(p, plan, index);
    if (work.rows == 0) continue;
    const bool busy = first_row < work.rows;  // warps without rows still load
    const Sequence sequence = sequence_of(p, work.sequence);
    __syncthreads();  // the last piece of work is done with shared memory
    load_fp32_queries<Traits>(queries, p, sequence, work);
    if (threadIdx.x < Traits::kRows) {
      const int row = min(static_cast<int>(threadIdx.x), work.rows - 1);
      views[threadIdx.x] = row_view(p, sequence, packed_row(work, row).token, work.split);
    }
    __syncthreads();
    const View view = tile_view(p, sequence, work.split, views[0], views[Traits::kRows - 1]);
    const TreeCut cut = tree_cut(p, plan, work);
    SegmentWalk walk(p.shard.for_sequence(work.sequence).order(sequence.kv_len), view.any,
                     cut.split, cut.splits);
    typename Traits::State state;
    state.clear();
    typename Traits::Stack stack(plan.stack, plan.depth);
    bool more = walk.next();
    while (more) {
      const std::int64_t first = walk.segment * kSegment, place = walk.place;
      float s[Traits::kKeyTiles][4] = {};
#pragma unroll 1
      for (int d = 0; d < p.head_dim; d += Traits::kSliceDims) {
        __syncthreads();
        load_fp32<Traits, Traits::kSliceDims, kSegment>(
            slice, Traits::kKeyStride, p, p.k, p.head_dim, work.kv_head, sequence, view, first, d);
        if (p.bias && d == 0)
          columns[threadIdx.x] = key_column(p, sequence, view, first + threadIdx.x);
        arch::wait_copies<0>();
        __syncthreads();
        if (busy)
          multiply_slice_tf32<Traits>(s, queries + first_row * Traits::kQueryStride + d, slice);
      }
      state.clear();
      if (busy) weigh_rows_tf32<Traits>(s, p, work, views, view, first, columns, state);
#pragma unroll 1
      for (int key = 0; key < kSegment; key += Traits::kSliceKeys) {
        __syncthreads();
        load_fp32<Traits, Traits::kDim, Traits::kSliceKeys>(slice, Traits::kValueStride, p, p.v,
                                                            p.value_dim, work.kv_head, sequence,
                                                            view, first + key, 0);
        arch::wait_copies<0>();
        __syncthreads();
        if (busy) accumulate_slice_tf32<Traits>(state, s, slice);
      }
      scale_values(state, p.v_scale, work.kv_head);
      more = walk.next();
      if (more && busy) stack.finish_subtree(state, finished_level(place, walk.place));
    }
    if (busy) stack.fold_all(state);
    arch::wait_copies<0>();
    store_tf32<Traits>(p, plan, sequence, work, state);
  }
}

template <int kDim>
KernelShape tf32_shape() {
  using Traits = Tf32Traits<kDim>;
  static_assert(Traits::kThreads == kSegment, "a thread gives the column of a key");
  static_assert(Traits::kSharedBytes == bytes_of(Family::tf32, Loader::any16, kDim, Traits::kRows));
  return {.tiled = attend_tf32_kernel<Traits>,
          .threads = Traits::kThreads,
          .shared_bytes = Traits::kSharedBytes,
          .tile_rows = Traits::kRows,
          .state_bytes = Traits::Stack::kStateBytes,
          .resumes = true};
}

}  // namespace longspan::kernels::cuda
