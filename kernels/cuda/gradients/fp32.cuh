// The products of backward by FFMA, of tensors of any type and layout.
//
// A block of 16 x 16 threads owns 64 rows or keys; a thread has four of them, for every 16th of
// the 64 that stream by, and then for its columns of the sums. Products are made in slices of 32
// dims, and summed dim by dim, so that dP of a row that sees one key is its D to the bit.
#pragma once

#include "kernels/cuda/gradients/operands.cuh"

namespace longspan::kernels::cuda {

/// Elements d ... d + 3 of a row that begins at element `at`, as fp32 (exact); zeros from the last
/// dim on, and of kNoRow.
__device__ inline float4 load_four(const GradientTensor& from, std::int64_t at, int d) {
  if (at == kNoRow || d >= from.dim) return {};
  if (from.aligned) {
    if (from.dtype == DType::fp32)
      return *reinterpret_cast<const float4*>(static_cast<const float*>(from.data) + at + d);
    const uint2 words =
        *reinterpret_cast<const uint2*>(static_cast<const std::uint16_t*>(from.data) + at + d);
    const auto widen = [&](std::uint32_t half) {
      return from.dtype == DType::bf16
                 ? __uint_as_float(half << 16)
                 : __half2float(__ushort_as_half(static_cast<unsigned short>(half)));
    };
    return make_float4(widen(words.x & 0xffffu), widen(words.x >> 16), widen(words.y & 0xffffu),
                       widen(words.y >> 16));
  }
  const auto element = [&](int i) {
    return d + i < from.dim ? load_element(from.data, from.dtype, at + d + i) : 0.0f;
  };
  return make_float4(element(0), element(1), element(2), element(3));
}

// A block of 16 x 16 threads multiplies 64 rows of A by 64 of B. A thread has those of A that are
// y + 16 i, and those of B that are x + 16 j.
inline constexpr int kFp32Threads = 256;
inline constexpr int kFp32Dims = 32;                   // of a slice in shared memory
inline constexpr int kFp32Stride = kFp32Dims + 4;      // the pad moves rows to other banks
inline constexpr int kFp32Floats = 128 * kFp32Stride;  // of a slice of A and B

__device__ inline int fp32_x() { return static_cast<int>(threadIdx.x) % 16; }
__device__ inline int fp32_y() { return static_cast<int>(threadIdx.x) / 16; }

/// s += A B^T; `slice` is free after a barrier. Rows are loaded from where `a_at` and `b_at` say.
__device__ inline void add_fp32_products(float (&s)[4][4], float* slice, const GradientTensor& a,
                                         const std::int64_t* a_at, const GradientTensor& b,
                                         const std::int64_t* b_at) {
  float* const of_a = slice;
  float* const of_b = slice + 64 * kFp32Stride;
#pragma unroll 1
  for (int first = 0; first < a.dim; first += kFp32Dims) {
    __syncthreads();  // every thread is done with the last slice
#pragma unroll
    for (int i = static_cast<int>(threadIdx.x); i < 64 * kFp32Dims / 4; i += kFp32Threads) {
      const int row = i / (kFp32Dims / 4), d = i % (kFp32Dims / 4) * 4, to = row * kFp32Stride + d;
      *reinterpret_cast<float4*>(of_a + to) = load_four(a, a_at[row], first + d);
      *reinterpret_cast<float4*>(of_b + to) = load_four(b, b_at[row], first + d);
    }
    __syncthreads();  // the slice is there
#pragma unroll 2
    for (int d = 0; d < kFp32Dims; d += 4) {
      float4 own[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        own[i] = *reinterpret_cast<const float4*>(of_a + (fp32_y() + 16 * i) * kFp32Stride + d);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float4 other =
            *reinterpret_cast<const float4*>(of_b + (fp32_x() + 16 * j) * kFp32Stride + d);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          s[i][j] = fmaf(
              own[i].w, other.w,
              fmaf(own[i].z, other.z, fmaf(own[i].y, other.y, fmaf(own[i].x, other.x, s[i][j]))));
      }
    }
  }
}

template <bool kOfRows, int kColumnCount>
class Fp32Gradients : GradientOperands<GradientWork<kOfRows, 64, 64>, kOfRows> {
  using Operands = GradientOperands<GradientWork<kOfRows, 64, 64>, kOfRows>;
  using Operands::p_, Operands::work_;

 public:
  static constexpr bool kRowsOwn = kOfRows;
  static constexpr int kOwn = 64, kStream = 64, kThreads = kFp32Threads, kBlocks = 2;
  static constexpr int kColumns = kColumnCount;      // of a panel
  static constexpr int kFloats = 4 * kColumns / 16;  // sums of a thread
  static constexpr int kRows = 32;                   // of a slice of X
  static constexpr int kWeightStride = kStream + 4;
  static constexpr int kSliceFloats = kFp32Floats > kRows* kColumns ? kFp32Floats : kRows* kColumns;
  static constexpr int kBytes = 4 * (kSliceFloats + kOwn * kWeightStride);
  using Work = GradientWork<kRowsOwn, kOwn, kStream>;

  __device__ __forceinline__ Fp32Gradients(const GradientParams& p, const GradientPlan& plan,
                                           const Work& work, std::byte* shared)
      : Operands(p, plan, work),
        rule_(p),
        slice_(reinterpret_cast<float*>(shared)),
        weights_(slice_ + kSliceFloats) {}

  __device__ __forceinline__ void load_owned() {
#pragma unroll
    for (double& slope : slopes_) slope = 0.0;
  }
  __device__ __forceinline__ void load(int) const {}
  __device__ __forceinline__ void wait() const {}

  __device__ __forceinline__ void multiply(const StreamTile& tile, int number,
                                           float (&sums)[kFloats]) {
    const int slot = number % Work::kSlots;
    const auto& stream = work_.stream[slot];
    const bool of_values = this->of_values();
    float s[4][4] = {}, g[4][4] = {};
    add_fp32_products(s, slice_, this->own_first(), work_.own.first_at, this->stream_first(),
                      stream.first_at);
    if (!of_values)
      add_fp32_products(g, slice_, this->own_second(), work_.own.second_at, this->stream_second(),
                        stream.second_at);
    weigh_all(s, g, work_.full(tile, slot), slot, of_values);
    if (of_values)
      add_weighed(sums, this->stream_second(), stream.second_at);
    else
      add_weighed(sums, this->stream_first(), stream.first_at);
  }

  __device__ __forceinline__ void store(const float (&sums)[kFloats]) {
    const GradientSums& to = this->target();
    const std::int64_t first = this->first_sum();
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int own = fp32_y() + 16 * r;
      if (own >= work_.count) continue;
      float* const row = to.at(work_.kv_head, first + own);
#pragma unroll
      for (int c = 0; c < kColumns / 64; ++c) {
        const int column = work_.column + c * 64 + fp32_x() * 4;
        if (column >= GradientSums::padded(to.dim)) continue;
        const float* const own_sums = sums + r * (kColumns / 16) + c * 4;
        float4 sum = make_float4(own_sums[0], own_sums[1], own_sums[2], own_sums[3]);
        float4& at = *reinterpret_cast<float4*>(row + column);
        if (this->resumes()) {
          const float4 before = at;
          sum = make_float4(before.x + sum.x, before.y + sum.y, before.z + sum.z, before.w + sum.w);
        }
        at = sum;
      }
    }
    if (this->wants_slopes()) store_slopes();
  }

 private:
  /// Writes W, [owned, streamed].
  __device__ __forceinline__ void weigh_all(const float (&s)[4][4], const float (&g)[4][4],
                                            bool full, int slot, bool of_values) {
    const auto& rows = work_.rows(slot);
    const auto& keys = work_.keys(slot);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float slope = 0.0f;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int own = fp32_y() + 16 * i, other = fp32_x() + 16 * j;
        const int row = kRowsOwn ? own : other, key = kRowsOwn ? other : own;
        const bool seen = full || rows.view[row].contains(keys.place[key]);
        const float bias = rule_.biased ? bias_of(p_, work_.sequence.index, rows.index[row],
                                                  rows.head[row], keys.column[key])
                                        : 0.0f;
        const float kept = rule_.drops ? kept_of(p_, rule_, work_.sequence, rows.index[row],
                                                 rows.head[row], keys.column[key])
                                       : 1.0f;
        const Weighed found =
            weigh(rule_, s[i][j], g[i][j], bias, kept, seen, rows.lse[row], rows.lse_low[row],
                  rows.d[row], [](float e) { return exp2f(e); });
        weights_[own * kWeightStride + other] = of_values ? found.p : found.dx;
        if (this->wants_slopes())
          slope = fmaf(found.ds,
                       alibi_distance(p_.bias.alibi, rows.index[row], keys.column[key], 0), slope);
      }
      if (this->wants_slopes()) slopes_[i] += double{slope};
    }
  }

  /// Sums += W X. What has no weight is skipped: infinity and NaN in X then reach only those that
  /// have a weight for them.
  __device__ __forceinline__ void add_weighed(float (&sums)[kFloats], const GradientTensor& from,
                                              const std::int64_t* at) const {
#pragma unroll 1
    for (int first = 0; first < kStream; first += kRows) {
      __syncthreads();  // W is there, and every thread is done with the last slice
#pragma unroll
      for (int i = static_cast<int>(threadIdx.x); i < kRows * kColumns / 4; i += kThreads) {
        const int row = i / (kColumns / 4), d = i % (kColumns / 4) * 4;
        *reinterpret_cast<float4*>(slice_ + row * kColumns + d) =
            load_four(from, at[first + row], work_.column + d);
      }
      __syncthreads();  // the slice is there
#pragma unroll 4
      for (int j = 0; j < kRows; ++j) {
        float weight[4];
#pragma unroll
        for (int r = 0; r < 4; ++r)
          weight[r] = weights_[(fp32_y() + 16 * r) * kWeightStride + first + j];
#pragma unroll
        for (int c = 0; c < kColumns / 64; ++c) {
          const float4 row =
              *reinterpret_cast<const float4*>(slice_ + j * kColumns + c * 64 + fp32_x() * 4);
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            float* const sum = sums + r * (kColumns / 16) + c * 4;
            if (weight[r] != 0.0f) {
              sum[0] = fmaf(weight[r], row.x, sum[0]);
              sum[1] = fmaf(weight[r], row.y, sum[1]);
              sum[2] = fmaf(weight[r], row.z, sum[2]);
              sum[3] = fmaf(weight[r], row.w, sum[3]);
            }
          }
        }
      }
    }
  }

  /// Adds up what the 16 threads of a row have.
  __device__ __forceinline__ void store_slopes() const {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      double sum = slopes_[r];
#pragma unroll
      for (int step = 1; step < 16; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
      const int own = fp32_y() + 16 * r;
      if (fp32_x() == 0 && own < work_.count) this->slope_of(own) = sum;
    }
  }

  const ScoreRule rule_;
  float* const slice_;    // of operands, or of X
  float* const weights_;  // [owned, kWeightStride] W
  double slopes_[4];      // of the thread's rows: dS times distances
};

}  // namespace longspan::kernels::cuda
