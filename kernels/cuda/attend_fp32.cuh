// Attention of fp32 tensors in true fp32: every product is an FFMA, since tensor cores would round
// the inputs to tf32. One kernel for short and long queries, always in the fixed order.
//
// A block holds 32 packed rows. Half a warp owns four of them through both products, so that P
// passes through shared memory without a barrier of the block:
//
//     S: lane x of the half holds keys x, x + 16 ... of the segment's 128
//     O: lane x holds dims 4 x ... 4 x + 3, 64 + 4 x ...
#pragma once

#include "kernels/cuda/attend.hpp"
#include "kernels/cuda/fold_stack.cuh"
#include "kernels/cuda/tile.cuh"
#include "kernels/cuda/view.cuh"

namespace longspan::kernels::cuda {

// ---- traits ---------------------------------------------------------------------------------

template <int kHeadDim>
struct Fp32Traits {
  static constexpr int kDim = kHeadDim;
  static constexpr int kThreads = 128;
  static constexpr int kHalves = kThreads / 16;
  static constexpr int kRows = 32;
  static constexpr int kOwn = kRows / kHalves;     // rows of a half warp
  static constexpr int kKeySteps = kSegment / 16;  // keys of a lane
  static constexpr int kSliceDims = 32;            // of K, loaded at a time
  static constexpr int kSliceKeys = 32;            // of V
  static constexpr int kQueryStride = kDim + 4;    // the pads move rows to other banks
  static constexpr int kSliceStride = kSliceDims + 4;
  static constexpr int kWeightStride = kSegment + 4;

  static constexpr int kSliceFloats =
      kSegment * kSliceStride > kSliceKeys* kDim ? kSegment* kSliceStride : kSliceKeys* kDim;
  static constexpr int kSharedBytes =
      4 * (kRows * kQueryStride + kSliceFloats + kRows * kWeightStride) +
      kRows * static_cast<int>(sizeof(Interval)) + 16;

  struct RowOf {  // quad = own row * (kDim / 64) + quad of dims
    __device__ static constexpr int row(int quad, int) { return quad / (kDim / 64); }
  };
  using State = ThreadState<kOwn, kOwn * kDim / 64, RowOf>;
  using Stack = FoldStack<State, kThreads, false>;
};

// ---- steps ----------------------------------------------------------------------------------

/// Columns [column, column + kColumns) of kCount keys -> shared memory, zeros where nobody sees.
template <int kColumns, int kCount, int kThreads>
__device__ inline void load_fp32(float* to, int stride, const Rows& source, int kv_head, int dim,
                                 const Sequence& sequence, const View& view, std::int64_t first,
                                 int column) {
  for (int index = static_cast<int>(threadIdx.x); index < kCount * kColumns / 4;
       index += kThreads) {
    const int row = index / (kColumns / 4), quad = index % (kColumns / 4) * 4;
    const std::int64_t key = first + row;
    bool valid = view.any.contains(key) && column + quad < dim;
    if (view.table != nullptr && valid) valid = view.positions.contains(view.table[key]);
    const float* from =
        valid ? source.at<const float>(sequence.first_key + key, kv_head) + column + quad
              : static_cast<const float*>(source.data);
    arch::copy_async(arch::shared_address(to + row * stride + quad), from, valid);
  }
  arch::commit_copies();
}

/// s += Q K^T over one slice of dims.
template <class Traits>
__device__ inline void multiply_slice(float (&s)[Traits::kOwn][Traits::kKeySteps],
                                      const float* queries, const float* keys) {
  const int half = threadIdx.x / 16, lane = threadIdx.x % 16;
#pragma unroll
  for (int d = 0; d < Traits::kSliceDims; d += 4) {
    float4 q[Traits::kOwn];
#pragma unroll
    for (int r = 0; r < Traits::kOwn; ++r)
      q[r] = *reinterpret_cast<const float4*>(queries +
                                              (half * Traits::kOwn + r) * Traits::kQueryStride + d);
#pragma unroll
    for (int j = 0; j < Traits::kKeySteps; ++j) {
      const float4 k =
          *reinterpret_cast<const float4*>(keys + (lane + 16 * j) * Traits::kSliceStride + d);
#pragma unroll
      for (int r = 0; r < Traits::kOwn; ++r)
        s[r][j] =
            fmaf(q[r].w, k.w, fmaf(q[r].z, k.z, fmaf(q[r].y, k.y, fmaf(q[r].x, k.x, s[r][j]))));
    }
  }
}

/// Products -> P of the half warp's rows in shared memory; maxima and sums into the state.
template <class Traits>
__device__ inline void weigh_rows(float (&s)[Traits::kOwn][Traits::kKeySteps],
                                  const AttendParams& p, const Interval* views, const View& view,
                                  std::int64_t local_len, std::int64_t first, float* weights,
                                  typename Traits::State& state) {
  const int half = threadIdx.x / 16, lane = threadIdx.x % 16;
#pragma unroll
  for (int r = 0; r < Traits::kOwn; ++r) {
    const int row = half * Traits::kOwn + r;
    const Interval seen_by_row = views[row];
    float top = -infinity();
#pragma unroll
    for (int j = 0; j < Traits::kKeySteps; ++j) {
      const std::int64_t key = first + lane + 16 * j;
      const bool seen = view.table == nullptr
                            ? seen_by_row.contains(key)
                            : key < local_len && seen_by_row.contains(view.table[key]);
      s[r][j] = seen ? p.score(s[r][j]) : -infinity();
      top = fmaxf(top, s[r][j]);
    }
#pragma unroll
    for (int step = 1; step < 16; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
    const float from = top == -infinity() ? 0.0f : top;  // nothing visible: P = 0
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < Traits::kKeySteps; ++j) {
      const float weight = exp2f(__fadd_rn(s[r][j], -from));
      sum = __fadd_rn(sum, weight);
      weights[row * Traits::kWeightStride + lane + 16 * j] = weight;
    }
#pragma unroll
    for (int step = 1; step < 16; step *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, step));
    state.stats[r] = {top, sum};
  }
  __syncwarp();
}

/// O += P V over one slice of keys.
template <class Traits>
__device__ inline void accumulate_slice(typename Traits::State& state, const float* weights,
                                        const float* values) {
  const int half = threadIdx.x / 16, lane = threadIdx.x % 16;
#pragma unroll 4
  for (int key = 0; key < Traits::kSliceKeys; ++key) {
    float weight[Traits::kOwn];
#pragma unroll
    for (int r = 0; r < Traits::kOwn; ++r)
      weight[r] = weights[(half * Traits::kOwn + r) * Traits::kWeightStride + key];
#pragma unroll
    for (int c = 0; c < Traits::kDim / 64; ++c) {
      const float4 v =
          *reinterpret_cast<const float4*>(values + key * Traits::kDim + c * 64 + lane * 4);
#pragma unroll
      for (int r = 0; r < Traits::kOwn; ++r) {
        float(&o)[4] = state.o[r * (Traits::kDim / 64) + c];
        o[0] = fmaf(weight[r], v.x, o[0]);
        o[1] = fmaf(weight[r], v.y, o[1]);
        o[2] = fmaf(weight[r], v.z, o[2]);
        o[3] = fmaf(weight[r], v.w, o[3]);
      }
    }
  }
}

template <class Traits>
__device__ inline void store_fp32(const AttendParams& p, const Plan& plan, const Sequence& sequence,
                                  const Work& work, const typename Traits::State& state) {
  const int half = threadIdx.x / 16, lane = threadIdx.x % 16;
  const StateSlots& slots = plan.splits == 1 ? p.state : plan.parts;
  const int slot = plan.splits == 1 ? p.slot : work.split;
#pragma unroll
  for (int r = 0; r < Traits::kOwn; ++r) {
    const int row = half * Traits::kOwn + r;
    if (row >= work.rows) continue;
    const PackedRow at = packed_row(p, work, row);
    const std::int64_t to = plan.splits == 1 ? (sequence.first_row + at.token) * p.heads + at.head
                                             : part_row(p, plan, work.sequence, at.token, at.head);
    if (lane == 0) slots.stats(slot)[to] = state.stats[r];
#pragma unroll
    for (int c = 0; c < Traits::kDim / 64; ++c) {
      const float(&o)[4] = state.o[r * (Traits::kDim / 64) + c];
      const int d = c * 64 + lane * 4;
      if (d < p.dim)
        *reinterpret_cast<float4*>(slots.o(slot, to) + d) = make_float4(o[0], o[1], o[2], o[3]);
    }
  }
}

// ---- the kernel -----------------------------------------------------------------------------

template <class Traits>
__global__ __launch_bounds__(Traits::kThreads,
                             2) void attend_fp32_kernel(const __grid_constant__ AttendParams p,
                                                        const __grid_constant__ Plan plan) {
  extern __shared__ __align__(128) std::byte memory[];
  float* queries = reinterpret_cast<float*>(memory);
  float* slice = queries + Traits::kRows * Traits::kQueryStride;
  float* weights = slice + Traits::kSliceFloats;
  Interval* views = reinterpret_cast<Interval*>(weights + Traits::kRows * Traits::kWeightStride);

  int* next_index = reinterpret_cast<int*>(views + Traits::kRows);

  for (int index = blockIdx.x; index < plan.works; index = next_work(plan, index, next_index)) {
    const Work work = work_of(p, plan, index);
    if (work.rows == 0) continue;
    const Sequence sequence = sequence_of(p, work.sequence);
    __syncthreads();  // the last piece of work is done with shared memory
    for (int i = static_cast<int>(threadIdx.x); i < Traits::kRows * Traits::kDim / 4;
         i += Traits::kThreads) {
      const int row = i / (Traits::kDim / 4), d = i % (Traits::kDim / 4) * 4;
      const bool valid = row < work.rows && d < p.dim;
      const PackedRow at = packed_row(p, work, row);
      const float* from = valid ? p.q.at<const float>(sequence.first_row + at.token, at.head) + d
                                : static_cast<const float*>(p.q.data);
      arch::copy_async(arch::shared_address(queries + row * Traits::kQueryStride + d), from, valid);
    }
    arch::commit_copies();  // also where no segment follows: the next piece waits for them
    if (threadIdx.x < Traits::kRows) {
      const int row = min(static_cast<int>(threadIdx.x), work.rows - 1);
      views[threadIdx.x] = row_view(p, sequence, packed_row(p, work, row).token);
    }

    __syncthreads();
    const View view = tile_view(p.shard, sequence, views[0], views[Traits::kRows - 1]);
    SegmentWalk walk(p.shard.order(sequence.kv_len), view.any, work.split, plan.splits);
    typename Traits::State state;
    state.clear();
    typename Traits::Stack stack(plan.stack, plan.depth);
    bool more = walk.next();
    while (more) {
      const std::int64_t first = walk.segment * kSegment, place = walk.place;
      float s[Traits::kOwn][Traits::kKeySteps] = {};
#pragma unroll 1
      for (int d = 0; d < Traits::kDim; d += Traits::kSliceDims) {
        __syncthreads();
        load_fp32<Traits::kSliceDims, kSegment, Traits::kThreads>(
            slice, Traits::kSliceStride, p.k, work.kv_head, p.dim, sequence, view, first, d);
        arch::wait_copies<0>();
        __syncthreads();
        multiply_slice<Traits>(s, queries + d, slice);
      }
      state.clear();
      weigh_rows<Traits>(s, p, views, view, sequence.local_len, first, weights, state);
#pragma unroll 1
      for (int key = 0; key < kSegment; key += Traits::kSliceKeys) {
        __syncthreads();
        load_fp32<Traits::kDim, Traits::kSliceKeys, Traits::kThreads>(
            slice, Traits::kDim, p.v, work.kv_head, p.dim, sequence, view, first + key, 0);
        arch::wait_copies<0>();
        __syncthreads();
        accumulate_slice<Traits>(state, weights + key, slice);
      }
      more = walk.next();
      if (more) stack.finish_subtree(state, finished_level(place, walk.place));
    }
    stack.fold_all(state);
    arch::wait_copies<0>();
    store_fp32<Traits>(p, plan, sequence, work, state);
  }
}

template <int kDim>
KernelShape fp32_shape() {
  using Traits = Fp32Traits<kDim>;
  return {reinterpret_cast<const void*>(&attend_fp32_kernel<Traits>), Traits::kThreads,
          Traits::kSharedBytes, Traits::kRows, Traits::Stack::kStateBytes};
}

}  // namespace longspan::kernels::cuda
