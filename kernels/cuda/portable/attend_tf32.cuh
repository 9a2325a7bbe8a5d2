// Attention of fp32 tensors with products of tf32 (AttendParams::tf32): mma.sync on factors rounded
// to 10 bits of mantissa, fp32 sums; scores, weights' sums and states stay fp32.
//
//     S = tf32(Q) tf32(K)^T,   P = exp2(S - max S),   O = tf32(P) tf32(V)
//
// A block holds 64 packed rows, a warp 16 of them with all 128 keys of a segment. The sum over keys
// may have any order, so slot t of a P V step is key 2t and slot t + 4 is key 2t + 1: the
// accumulators of S are then already the fragments of P, and P never leaves the registers. The
// kernel keeps the fixed order; its outer loop is in segment_loop.cuh. One instance of each dim
// supports pages of any layout, fp8, scales and biases.
#pragma once

#include "kernels/cuda/arch/tf32.cuh"
#include "kernels/cuda/portable/attend_tf32.hpp"
#include "kernels/cuda/portable/segment_loop.cuh"
#include "longspan/score.hpp"

namespace longspan::kernels::cuda {

// ---- traits ---------------------------------------------------------------------------------

template <int kHeadDim>
struct Tf32Traits {
  static constexpr int kDim = kHeadDim;
  static constexpr int kValueDim = kHeadDim;
  static constexpr bool kPlain = false;  // of the loaders
  static constexpr int kThreads = 128;
  static constexpr int kRows = 64;                     // 16 of a warp
  static constexpr int kKeyTiles = kSegment / 8;       // n8 tiles of S
  static constexpr int kDimTiles = kDim / 8;           // n8 tiles of O
  static constexpr int kBlocks = kDim <= 128 ? 2 : 1;  // on a multiprocessor
  static constexpr int kSliceDims = 64;                // of K, loaded at a time
  static constexpr int kSliceKeys = 64;                // of V
  // A stride of 4 modulo 32 banks: rows g and columns t of a fragment do not conflict, nor do V's
  // rows 2t and columns g.
  static constexpr int kQueryStride = kDim + 4;
  static constexpr int kKeyStride = kSliceDims + 4;
  static constexpr int kValueStride = kDim + 4;

  static constexpr int kKeyFloats = kSegment * kKeyStride;
  static constexpr int kValueFloats = kSliceKeys * kValueStride;
  static constexpr int kScratchWords = kSegment;  // columns of the biases, of each key

  struct RowOf {
    __device__ static constexpr int row(int, int i) { return i / 2; }
  };
  using State = ThreadState<2, kDimTiles, RowOf>;
  using Stack = FoldStack<State, kThreads>;
};

// ---- products -------------------------------------------------------------------------------

/// The products of attend_segments_kernel with tensor cores. In the steps, a thread is lane 4 g + t
/// of its warp, and its rows are g and g + 8 of the warp's 16.
template <class Traits_>
class Tf32Products {
 public:
  using Traits = Traits_;
  using Scores = float[Traits::kKeyTiles][4];
  using State = typename Traits::State;

  __device__ __forceinline__ explicit Tf32Products(const SegmentShared<Traits>& shared)
      : queries_(shared.queries),
        slice_(shared.slice),
        columns_(reinterpret_cast<int*>(shared.scratch)),
        views_(shared.views) {}

  __device__ __forceinline__ bool busy(const TileCoord& work) const {
    return first_row_ < work.rows;
  }

  /// Computes the column of each key of the segment, for biases and dropout, once per segment.
  __device__ __forceinline__ void find_columns(const AttendParams& p, const Sequence& sequence,
                                               const View& view, std::int64_t first,
                                               int dim) const {
    static_assert(Traits::kThreads == kSegment, "a thread gives the column of a key");
    if ((p.bias || p.dropout) && dim == 0)
      columns_[threadIdx.x] = key_column(p, sequence, view, first + threadIdx.x);
  }

  __device__ __forceinline__ void multiply_keys(Scores& s, int dim) const {
    multiply_slice(s, queries_ + first_row_ * Traits::kQueryStride + dim, slice_);
  }

  __device__ __forceinline__ void weigh(Scores& s, const AttendParams& p, const Sequence& sequence,
                                        const TileCoord& work, const View& view, std::int64_t first,
                                        State& state) const {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const Score score{p.scale(work.sequence, work.kv_head), p.score.softcap};
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
            const int column = columns_[n * 8 + 2 * t + j];
            float& x = s[n][2 * half + j];
            x = RowBias::add(x, bias.alibi(column) + bias.qq(column));
          }
      }
      if (!view.full(first, kSegment)) {
        const Interval seen_by_row = views_[row];
#pragma unroll
        for (int n = 0; n < Traits::kKeyTiles; ++n)
#pragma unroll
          for (int j = 0; j < 2; ++j)
            if (!sees(view, seen_by_row, first + n * 8 + 2 * t + j))
              s[n][2 * half + j] = -infinity();
      }
      float top = -infinity();
#pragma unroll
      for (int n = 0; n < Traits::kKeyTiles; ++n)
        top = fmaxf(top, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      const float from = top == -infinity() ? 0.0f : top;  // if nothing is visible, P = 0
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
      if (!p.dropout) continue;
      const RowDropout dropout(p, p.dropout.key(), sequence,
                               packed_row(work, min(row, work.rows - 1)));
#pragma unroll
      for (int n = 0; n < Traits::kKeyTiles; ++n) {
        const int* const column = columns_ + n * 8 + 2 * t;
        const std::uint32_t dropped = dropout.drops(column[0], column[1]);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& x = s[n][2 * half + j];
          x = (dropped >> j & 1) != 0 ? 0.0f : __fmul_rn(x, p.dropout.scale);
        }
      }
    }
  }

  /// The P of the slice are the first of `s`; the next slice's are moved there, so that the same
  /// code serves all slices.
  __device__ __forceinline__ void multiply_values(State& state, Scores& s, int) const {
    constexpr int kTiles = Traits::kSliceKeys / 8;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const float* v = slice_ + 2 * t * Traits::kValueStride + g;
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

  __device__ __forceinline__ static void store(const AttendParams& p, const WorkPlan& plan,
                                               const Sequence& sequence, const TileCoord& work,
                                               const State& state) {
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

 private:
  /// s += Q K^T. `queries` are the warp's rows, at the slice's first dim.
  __device__ __forceinline__ static void multiply_slice(Scores& s, const float* queries,
                                                        const float* keys) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const float* q = queries + g * Traits::kQueryStride + t;
    const float* k = keys + g * Traits::kKeyStride + t;
#pragma unroll
    for (int d = 0; d < Traits::kSliceDims; d += 8) {
      const std::uint32_t a[4] = {
          arch::to_tf32(q[d]), arch::to_tf32(q[d + 8 * Traits::kQueryStride]),
          arch::to_tf32(q[d + 4]), arch::to_tf32(q[d + 4 + 8 * Traits::kQueryStride])};
#pragma unroll
      for (int n = 0; n < Traits::kKeyTiles; ++n) {
        const float* column = k + n * 8 * Traits::kKeyStride + d;
        arch::mma_tf32(s[n], a, arch::to_tf32(column[0]), arch::to_tf32(column[4]));
      }
    }
  }

  const float* const queries_;
  const float* const slice_;
  int* const columns_;
  const Interval* const views_;
  const int first_row_ = static_cast<int>(threadIdx.x) / 32 * 16;  // of the warp
};

template <int kDim>
KernelShape tf32_shape() {
  using Traits = Tf32Traits<kDim>;
  constexpr int kBytes = SegmentShared<Traits>::kBytes;
  static_assert(kBytes == bytes_of(Family::tf32, Loader::any16, kDim, Traits::kRows));
  return {.tiled = attend_segments_kernel<Tf32Products<Traits>>,
          .threads = Traits::kThreads,
          .shared_bytes = kBytes,
          .tile_rows = Traits::kRows,
          .state_bytes = Traits::Stack::kStateBytes,
          .resumes = true};
}

}  // namespace longspan::kernels::cuda
