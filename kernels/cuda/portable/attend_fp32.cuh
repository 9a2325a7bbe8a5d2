// Attention of fp32 tensors in true fp32: every product is an FFMA, since tensor cores would round
// the inputs to tf32. Short and long queries use the same kernel, always in the fixed order; its
// outer loop is in segment_loop.cuh.
//
// A block holds 32 packed rows. Half a warp owns four of them through both products, so that P
// passes through shared memory without a barrier of the block:
//
//     S: lane x of the half holds keys x, x + 16 ... of the segment's 128
//     O: lane x holds dims 4 x ... 4 x + 3, 64 + 4 x ...
//
// Each dim has two instances, plain (contiguous fp32 rows) and any (pages of any layout, fp8,
// scales, biases, dropout), so that plain tensors do not pay for the rest. Heads wider than 256
// have one more, with fewer rows. It reads elements of any type, and so serves all types for such
// heads.
#pragma once

#include <type_traits>

#include "kernels/cuda/dispatch/attend.hpp"
#include "kernels/cuda/portable/segment_loop.cuh"
#include "longspan/score.hpp"

namespace longspan::kernels::cuda {

// ---- traits ---------------------------------------------------------------------------------

template <int kHeadDim, int kMostValueDim, int kRowCount, bool kPlainRows>
struct Fp32Traits {
  static constexpr int kDim = kHeadDim;
  static constexpr int kValueDim = kMostValueDim;
  static constexpr bool kPlain = kPlainRows;  // for contiguous fp32, no scales, bias or dropout
  static constexpr int kThreads = 128;
  static constexpr int kHalves = kThreads / 16;
  static constexpr int kBlocks = 2;  // on a multiprocessor
  static constexpr int kRows = kRowCount;
  static constexpr int kOwn = kRows / kHalves;                   // rows of a half warp
  static constexpr int kKeySteps = kSegment / 16;                // keys of a lane
  static constexpr int kSliceDims = 32;                          // of K, loaded at a time
  static constexpr int kSliceKeys = kValueDim <= 256 ? 32 : 16;  // of V
  static constexpr int kQueryStride = kDim + 4;  // the pads move rows to other banks
  static constexpr int kKeyStride = kSliceDims + 4;
  static constexpr int kValueStride = kValueDim;
  static constexpr int kWeightStride = kSegment + 4;
  static constexpr int kKeyFloats = kSegment * kKeyStride;
  static constexpr int kValueFloats = kSliceKeys * kValueStride;
  static constexpr int kScratchWords = kRows * kWeightStride;  // P

  struct RowOf {  // quad = own row * (kValueDim / 64) + quad of dims
    __device__ static constexpr int row(int quad, int) { return quad / (kValueDim / 64); }
  };
  using State = ThreadState<kOwn, kOwn * kValueDim / 64, RowOf>;
  using Stack = FoldStack<State, kThreads>;
};

// ---- products -------------------------------------------------------------------------------

/// The products of attend_segments_kernel by FFMA.
template <class Traits_>
class Fp32Products {
 public:
  using Traits = Traits_;
  using Scores = float[Traits::kOwn][Traits::kKeySteps];
  using State = typename Traits::State;

  __device__ __forceinline__ explicit Fp32Products(const SegmentShared<Traits>& shared)
      : queries_(shared.queries),
        slice_(shared.slice),
        weights_(shared.scratch),
        views_(shared.views) {}

  __device__ __forceinline__ static std::true_type busy(const TileCoord&) { return {}; }
  __device__ __forceinline__ static void find_columns(const AttendParams&, const Sequence&,
                                                      const View&, std::int64_t, int) {}

  __device__ __forceinline__ void multiply_keys(Scores& s, int dim) const {
    const int half = threadIdx.x / 16, lane = threadIdx.x % 16;
#pragma unroll
    for (int d = 0; d < Traits::kSliceDims; d += 4) {
      float4 q[Traits::kOwn];
#pragma unroll
      for (int r = 0; r < Traits::kOwn; ++r)
        q[r] = *reinterpret_cast<const float4*>(
            queries_ + dim + (half * Traits::kOwn + r) * Traits::kQueryStride + d);
#pragma unroll
      for (int j = 0; j < Traits::kKeySteps; ++j) {
        const float4 k =
            *reinterpret_cast<const float4*>(slice_ + (lane + 16 * j) * Traits::kKeyStride + d);
#pragma unroll
        for (int r = 0; r < Traits::kOwn; ++r)
          s[r][j] =
              fmaf(q[r].w, k.w, fmaf(q[r].z, k.z, fmaf(q[r].y, k.y, fmaf(q[r].x, k.x, s[r][j]))));
      }
    }
  }

  __device__ __forceinline__ void weigh(Scores& s, const AttendParams& p, const Sequence& sequence,
                                        const TileCoord& work, const View& view, std::int64_t first,
                                        State& state) const {
    const int half = threadIdx.x / 16, lane = threadIdx.x % 16;
    Score score = p.score;
    if constexpr (!Traits::kPlain) score.scale = p.scale(work.sequence, work.kv_head);
#pragma unroll
    for (int r = 0; r < Traits::kOwn; ++r) {
      const int row = half * Traits::kOwn + r;
      const Interval seen_by_row = views_[row];
      float top = -infinity();
#pragma unroll
      for (int j = 0; j < Traits::kKeySteps; ++j) {
        const std::int64_t key = first + lane + 16 * j;
        s[r][j] = sees(view, seen_by_row, key) ? score(s[r][j]) : -infinity();
      }
      if constexpr (!Traits::kPlain) {
        if (p.bias) add_bias(s[r], p, sequence, work, row, view, first);
      }
#pragma unroll
      for (int j = 0; j < Traits::kKeySteps; ++j) top = fmaxf(top, s[r][j]);
#pragma unroll
      for (int step = 1; step < 16; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
      const float from = top == -infinity() ? 0.0f : top;  // if nothing is visible, P = 0
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < Traits::kKeySteps; ++j) {
        const float weight = exp2f(__fadd_rn(s[r][j], -from));
        sum = __fadd_rn(sum, weight);
        weights_[row * Traits::kWeightStride + lane + 16 * j] = weight;
      }
      if constexpr (!Traits::kPlain) {
        if (p.dropout) drop(p, sequence, work, row, view, first);
      }
#pragma unroll
      for (int step = 1; step < 16; step *= 2)
        sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, step));
      state.stats[r] = {top, sum};
    }
    __syncwarp();
  }

  __device__ __forceinline__ void multiply_values(State& state, Scores&, int first) const {
    const int half = threadIdx.x / 16, lane = threadIdx.x % 16;
#pragma unroll 4
    for (int key = 0; key < Traits::kSliceKeys; ++key) {
      float weight[Traits::kOwn];
#pragma unroll
      for (int r = 0; r < Traits::kOwn; ++r)
        weight[r] = weights_[first + (half * Traits::kOwn + r) * Traits::kWeightStride + key];
#pragma unroll
      for (int c = 0; c < Traits::kValueDim / 64; ++c) {
        const float4 v =
            *reinterpret_cast<const float4*>(slice_ + key * Traits::kValueDim + c * 64 + lane * 4);
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

  __device__ __forceinline__ static void store(const AttendParams& p, const WorkPlan& plan,
                                               const Sequence& sequence, const TileCoord& work,
                                               const State& state) {
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
        if (d < to.columns) store(d, make_float4(o[0], o[1], o[2], o[3]));
      }
    }
  }

 private:
  /// Adds ALiBi and qq_bias to the scores of one row.
  __device__ __forceinline__ static void add_bias(float (&s)[Traits::kKeySteps],
                                                  const AttendParams& p, const Sequence& sequence,
                                                  const TileCoord& work, int row, const View& view,
                                                  std::int64_t first) {
    const PackedRow at = packed_row(work, min(row, work.rows - 1));
    const RowBias bias(p.bias, query_row(p, work.sequence, at));
#pragma unroll
    for (int j = 0; j < Traits::kKeySteps; ++j) {
      const int column =
          key_column(p, sequence, view, first + static_cast<int>(threadIdx.x) % 16 + 16 * j);
      s[j] = RowBias::add(s[j], bias.alibi(column) + bias.qq(column));
    }
  }

  /// Drops weights of one row, each thread those that it has stored.
  __device__ __forceinline__ void drop(const AttendParams& p, const Sequence& sequence,
                                       const TileCoord& work, int row, const View& view,
                                       std::int64_t first) const {
    const RowDropout dropout(p, p.dropout.key(), sequence,
                             packed_row(work, min(row, work.rows - 1)));
    const int lane = static_cast<int>(threadIdx.x) % 16;
#pragma unroll 1
    for (int j = 0; j < Traits::kKeySteps; ++j)
      dropout.drop(weights_[row * Traits::kWeightStride + lane + 16 * j],
                   key_column(p, sequence, view, first + lane + 16 * j));
  }

  const float* const queries_;
  const float* const slice_;
  float* const weights_;  // P
  const Interval* const views_;
};

KernelShape attend_fp32_any(int dim);  // the instances that are not plain

template <int kDim, bool kPlain, int kValueDim = kDim, int kRows = 32>
KernelShape fp32_shape() {
  using Traits = Fp32Traits<kDim, kValueDim, kRows, kPlain>;
  constexpr Loader kLoader = kPlain ? Loader::plain : Loader::any16;
  constexpr int kBytes = SegmentShared<Traits>::kBytes;
  static_assert(kBytes == bytes_of(Family::fp32, kLoader, kDim, Traits::kRows));
  return {.tiled = attend_segments_kernel<Fp32Products<Traits>>,
          .threads = Traits::kThreads,
          .shared_bytes = kBytes,
          .tile_rows = Traits::kRows,
          .state_bytes = Traits::Stack::kStateBytes,
          .resumes = true};
}

}  // namespace longspan::kernels::cuda
