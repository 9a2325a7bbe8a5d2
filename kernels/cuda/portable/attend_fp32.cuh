// Attention of fp32 tensors in true fp32: every product is an FFMA, since tensor cores would round
// the inputs to tf32. One kernel for short and long queries, always in the fixed order.
//
// A block holds 32 packed rows. Half a warp owns four of them through both products, so that P
// passes through shared memory without a barrier of the block:
//
//     S: lane x of the half holds keys x, x + 16 ... of the segment's 128
//     O: lane x holds dims 4 x ... 4 x + 3, 64 + 4 x ...
//
// Two instances of each dim: plain (contiguous fp32 rows) and any (pages of any layout, fp8,
// scales, biases), so that plain tensors pay for nothing else. One more for heads wider than 256,
// with fewer rows: it reads elements of any type, so it is all types' kernel for such heads.
#pragma once

#include "kernels/cuda/arch/shared.cuh"
#include "kernels/cuda/arch/sm80.cuh"
#include "kernels/cuda/common/bias.cuh"
#include "kernels/cuda/common/fold_stack.cuh"
#include "kernels/cuda/common/next_work.cuh"
#include "kernels/cuda/common/store_state.cuh"
#include "kernels/cuda/common/view.cuh"
#include "kernels/cuda/dispatch/attend.hpp"

namespace longspan::kernels::cuda {

// ---- traits ---------------------------------------------------------------------------------

template <int kHeadDim, int kMostValueDim, int kRowCount, bool kPlainRows>
struct Fp32Traits {
  static constexpr int kDim = kHeadDim;
  static constexpr int kValueDim = kMostValueDim;
  static constexpr bool kPlain = kPlainRows;  // contiguous fp32, no scales, no bias
  static constexpr int kThreads = 128;
  static constexpr int kHalves = kThreads / 16;
  static constexpr int kRows = kRowCount;
  static constexpr int kOwn = kRows / kHalves;                   // rows of a half warp
  static constexpr int kKeySteps = kSegment / 16;                // keys of a lane
  static constexpr int kSliceDims = 32;                          // of K, loaded at a time
  static constexpr int kSliceKeys = kValueDim <= 256 ? 32 : 16;  // of V
  static constexpr int kQueryStride = kDim + 4;  // the pads move rows to other banks
  static constexpr int kSliceStride = kSliceDims + 4;
  static constexpr int kWeightStride = kSegment + 4;

  static constexpr int kSliceFloats = kSegment * kSliceStride > kSliceKeys* kValueDim
                                          ? kSegment* kSliceStride
                                          : kSliceKeys* kValueDim;
  static constexpr int kSharedBytes =
      4 * (kRows * kQueryStride + kSliceFloats + kRows * kWeightStride) +
      kRows * static_cast<int>(sizeof(Interval)) + 16;

  struct RowOf {  // quad = own row * (kValueDim / 64) + quad of dims
    __device__ static constexpr int row(int quad, int) { return quad / (kValueDim / 64); }
  };
  using State = ThreadState<kOwn, kOwn * kValueDim / 64, RowOf>;
  using Stack = FoldStack<State, kThreads>;
};

// ---- steps ----------------------------------------------------------------------------------

/// Elements d ... d + 3 of a row that begins at element `row`, as fp32 (exact).
__device__ inline float4 load_four(const KvRows& source, DType dtype, std::int64_t row, int d) {
  const auto element = [&](int i) {
    return load_element(source.data, dtype, row + source.column(d + i));
  };
  return make_float4(element(0), element(1), element(2), element(3));
}

/// Whether 16 bytes at a time may be read from every fp32 row. In pages of one key the distance of
/// rows is that of pages.
__device__ inline bool aligned_rows(const Rows& rows, const Pages& pages,
                                    std::int64_t page_stride) {
  const bool one = pages && pages.size == 1;
  return reinterpret_cast<std::uintptr_t>(rows.data) % 16 == 0 &&
         (one || rows.row_stride % 4 == 0) && rows.head_stride % 4 == 0 &&
         (!pages || page_stride % 4 == 0);
}

/// The element at which a key's row of one head begins.
__device__ inline std::int64_t stored_row(const KvRows& source, const Pages& pages,
                                          const Sequence& sequence, std::int64_t key, int kv_head) {
  const std::int64_t head = kv_head * source.head_stride;
  if (!pages) return head + (sequence.first_key + key) * source.row_stride;
  return head + pages.page(sequence.index, key) * source.page_stride +
         key % pages.size * source.row_stride;
}

/// Columns [column, column + kColumns) of kCount keys -> shared memory, zeros where nobody sees and
/// past `dim`.
template <class Traits, int kColumns, int kCount>
__device__ inline void load_fp32(float* to, int stride, const AttendParams& p, const KvRows& source,
                                 int dim, int kv_head, const Sequence& sequence, const View& view,
                                 std::int64_t first, int column) {
  // Rows that cp.async may take; those of another type or layout go through registers.
  const bool direct = Traits::kPlain || (p.kv_dtype == DType::fp32 && source.dense() &&
                                         aligned_rows(source, p.pages, source.page_stride));
  for (int index = static_cast<int>(threadIdx.x); index < kCount * kColumns / 4;
       index += Traits::kThreads) {
    const int row = index / (kColumns / 4), quad = index % (kColumns / 4) * 4;
    const std::int64_t key = first + row;
    bool valid = view.any.contains(key) && column + quad < dim;
    if (view.table != nullptr && valid) valid = view.positions.contains(view.table[key]);
    float* place = to + row * stride + quad;
    const float* from = static_cast<const float*>(source.data);
    if constexpr (Traits::kPlain) {
      if (valid) from = source.at<const float>(sequence.first_key + key, kv_head) + column + quad;
    } else {
      const std::int64_t offset =
          valid ? stored_row(source, p.pages, sequence, key, kv_head) : std::int64_t{0};
      if (!direct) {
        *reinterpret_cast<float4*>(place) =
            valid ? load_four(source, p.kv_dtype, offset, column + quad) : float4{};
        continue;
      }
      if (valid) from += offset + column + quad;
    }
    arch::copy_async(arch::shared_address(place), from, valid);
  }
  arch::commit_copies();
}

/// The packed rows' queries -> shared memory, zeros past the last row and dim.
template <class Traits>
__device__ inline void load_fp32_queries(float* queries, const AttendParams& p,
                                         const Sequence& sequence, const Work& work) {
  const bool direct = Traits::kPlain || (p.q_dtype == DType::fp32 && aligned_rows(p.q, {}, 0));
  for (int i = static_cast<int>(threadIdx.x); i < Traits::kRows * Traits::kDim / 4;
       i += Traits::kThreads) {
    const int row = i / (Traits::kDim / 4), d = i % (Traits::kDim / 4) * 4;
    const bool valid = row < work.rows && d < p.head_dim;
    const PackedRow at = packed_row(work, row);
    const std::int64_t offset =
        valid ? (sequence.first_row + at.token) * p.q.row_stride + at.head * p.q.head_stride + d
              : std::int64_t{0};
    float* place = queries + row * Traits::kQueryStride + d;
    if (direct) {
      arch::copy_async(arch::shared_address(place), static_cast<const float*>(p.q.data) + offset,
                       valid);
    } else {
#pragma unroll
      for (int n = 0; n < 4; ++n)
        place[n] = valid ? load_element(p.q.data, p.q_dtype, offset + n) : 0.0f;
    }
  }
  arch::commit_copies();  // also where no segment follows: the next piece waits for them
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

/// Adds ALiBi and qq_bias to the scores of one row.
template <class Traits>
__device__ inline void add_bias(float (&s)[Traits::kKeySteps], const AttendParams& p,
                                const Sequence& sequence, const Work& work, int row,
                                const View& view, std::int64_t first) {
  const PackedRow at = packed_row(work, min(row, work.rows - 1));
  const RowBias bias(p.bias, query_row(p, work.sequence, at));
#pragma unroll
  for (int j = 0; j < Traits::kKeySteps; ++j) {
    const int column =
        key_column(p, sequence, view, first + static_cast<int>(threadIdx.x) % 16 + 16 * j);
    s[j] = RowBias::add(s[j], bias.alibi(column) + bias.qq(column));
  }
}

/// Products -> P of the half warp's rows in shared memory; maxima and sums into the state.
template <class Traits>
__device__ inline void weigh_rows(float (&s)[Traits::kOwn][Traits::kKeySteps],
                                  const AttendParams& p, const Sequence& sequence, const Work& work,
                                  const Interval* views, const View& view, std::int64_t first,
                                  float* weights, typename Traits::State& state) {
  const int half = threadIdx.x / 16, lane = threadIdx.x % 16;
  Score score = p.score;
  if constexpr (!Traits::kPlain) score.scale = p.scale(work.kv_head);
#pragma unroll
  for (int r = 0; r < Traits::kOwn; ++r) {
    const int row = half * Traits::kOwn + r;
    const Interval seen_by_row = views[row];
    float top = -infinity();
#pragma unroll
    for (int j = 0; j < Traits::kKeySteps; ++j) {
      const std::int64_t key = first + lane + 16 * j;
      s[r][j] = sees(view, seen_by_row, key) ? score(s[r][j]) : -infinity();
    }
    if constexpr (!Traits::kPlain) {
      if (p.bias) add_bias<Traits>(s[r], p, sequence, work, row, view, first);
    }
#pragma unroll
    for (int j = 0; j < Traits::kKeySteps; ++j) top = fmaxf(top, s[r][j]);
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
    for (int c = 0; c < Traits::kValueDim / 64; ++c) {
      const float4 v =
          *reinterpret_cast<const float4*>(values + key * Traits::kValueDim + c * 64 + lane * 4);
#pragma unroll
      for (int r = 0; r < Traits::kOwn; ++r) {
        float(&o)[4] = state.o[r * (Traits::kValueDim / 64) + c];
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
#pragma unroll
  for (int r = 0; r < Traits::kOwn; ++r) {
    const int row = half * Traits::kOwn + r;
    if (row >= work.rows) continue;
    const Target to = target_of(p, plan, sequence, work, packed_row(work, row));
    const RowStore<16> store(p, to, state.stats[r]);
#pragma unroll
    for (int c = 0; c < Traits::kValueDim / 64; ++c) {
      const float(&o)[4] = state.o[r * (Traits::kValueDim / 64) + c];
      const int d = c * 64 + lane * 4;
      if (d < p.value_dim) store(d, make_float4(o[0], o[1], o[2], o[3]));
    }
  }
}

// ---- the kernel -----------------------------------------------------------------------------

template <class Traits>
__global__ __launch_bounds__(Traits::kThreads,
                             2) void attend_fp32_kernel(const __grid_constant__ AttendParams p,
                                                        const __grid_constant__ Plan plan) {
  std::byte* const memory = arch::shared_by_128;
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
      float s[Traits::kOwn][Traits::kKeySteps] = {};
#pragma unroll 1
      for (int d = 0; d < p.head_dim; d += Traits::kSliceDims) {
        __syncthreads();
        load_fp32<Traits, Traits::kSliceDims, kSegment>(slice, Traits::kSliceStride, p, p.k,
                                                        p.head_dim, work.kv_head, sequence, view,
                                                        first, d);
        arch::wait_copies<0>();
        __syncthreads();
        multiply_slice<Traits>(s, queries + d, slice);
      }
      state.clear();
      weigh_rows<Traits>(s, p, sequence, work, views, view, first, weights, state);
#pragma unroll 1
      for (int key = 0; key < kSegment; key += Traits::kSliceKeys) {
        __syncthreads();
        load_fp32<Traits, Traits::kValueDim, Traits::kSliceKeys>(slice, Traits::kValueDim, p, p.v,
                                                                 p.value_dim, work.kv_head,
                                                                 sequence, view, first + key, 0);
        arch::wait_copies<0>();
        __syncthreads();
        accumulate_slice<Traits>(state, weights + key, slice);
      }
      if constexpr (!Traits::kPlain) scale_values(state, p.v_scale, work.kv_head);
      more = walk.next();
      if (more) stack.finish_subtree(state, finished_level(place, walk.place));
    }
    stack.fold_all(state);
    arch::wait_copies<0>();
    store_fp32<Traits>(p, plan, sequence, work, state);
  }
}

KernelShape attend_fp32_any(int dim);  // the instances that are not plain

template <int kDim, bool kPlain, int kValueDim = kDim, int kRows = 32>
KernelShape fp32_shape() {
  using Traits = Fp32Traits<kDim, kValueDim, kRows, kPlain>;
  constexpr Loader kLoader = kPlain ? Loader::plain : Loader::any16;
  static_assert(Traits::kSharedBytes == bytes_of(Family::fp32, kLoader, kDim, Traits::kRows));
  return {.tiled = attend_fp32_kernel<Traits>,
          .threads = Traits::kThreads,
          .shared_bytes = Traits::kSharedBytes,
          .tile_rows = Traits::kRows,
          .state_bytes = Traits::Stack::kStateBytes,
          .resumes = true};
}

}  // namespace longspan::kernels::cuda
