// The products of backward by mma of tf32, of fp32 tensors that allow it, for
// heads up to 128.
//
// As those of 16 bits (mma_16bit.cuh); but P and dX meet the rows of X in
// another order of the rows: t of an operand is row 2 t, and t + 4 is row 2 t +
// 1, which the lane has.
#pragma once

#include "kernels/cuda/arch/tf32.cuh"
#include "kernels/cuda/gradients/fp32.cuh"
#include "kernels/cuda/gradients/mma_tile.cuh"

namespace longspan::kernels::cuda {

template <bool kOfRows, int kDim>
class Tf32Gradients : public MmaGradients<kOfRows, kDim, 32> {
  using Base = MmaGradients<kOfRows, kDim, 32>;
  using Base::lane, Base::warp, Base::work_;
  using typename Base::Scores;

 public:
  using Base::kOwn, Base::kStream, Base::kThreads, Base::kFloats;
  using typename Base::Work;
  static constexpr int kBlocks = kDim <= 64 ? 2 : 1;
  static constexpr int kStride = kDim + 4;  // the pad moves rows to other banks
  static constexpr int kOwnFloats = kOwn * kStride, kStreamFloats = kStream * kStride;
  static constexpr int kBytes = 4 * (2 * kOwnFloats + 4 * kStreamFloats);

  __device__ __forceinline__ Tf32Gradients(const GradientParams& p, const GradientPlan& plan,
                                           const Work& work, std::byte* shared)
      : Base(p, plan, work),
        own_(reinterpret_cast<float*>(shared)),
        stream_(own_ + 2 * kOwnFloats) {}

  __device__ __forceinline__ void load_owned() {
    this->clear_slopes();
    load_rows<kOwn>(own_, this->own_first(), work_.own.first_at);
    load_rows<kOwn>(own_ + kOwnFloats, this->own_second(), work_.own.second_at);
    arch::commit_copies();
  }
  __device__ __forceinline__ void load(int number) const {
    if (work_.tiles[number % Work::kTiles].first < 0) return;
    const auto& slots = work_.stream[number % Work::kSlots];
    float* const to = stage(number);
    load_rows<kStream>(to, this->stream_first(), slots.first_at);
    load_rows<kStream>(to + kStreamFloats, this->stream_second(), slots.second_at);
    arch::commit_copies();
  }
  __device__ __forceinline__ static void wait() { arch::wait_copies<0>(); }

  __device__ __forceinline__ void multiply(const StreamTile& tile, int number,
                                           float (&sums)[kFloats]) {
    const float* const stream = stage(number);
    const bool of_values = this->of_values();
    Scores s = {}, g = {};
    add_products(s, own_, stream);
    if (!of_values) add_products(g, own_ + kOwnFloats, stream + kStreamFloats);
    const float* const rows = of_values ? stream + kStreamFloats : stream;
    if (this->weigh_all(s, g, tile, number % Work::kSlots, of_values))
      return this->add_seen(sums, s, [rows](int j, int n) {
        return *reinterpret_cast<const float2*>(rows + j * kStride + n * 8 + lane() % 4 * 2);
      });
    add_weighed(sums, s, rows);
  }

 private:
  __device__ float* stage(int number) const { return stream_ + number % 2 * 2 * kStreamFloats; }

  /// Loads rows, with zeros past the last dim and for kNoRow.
  template <int kRows>
  __device__ __forceinline__ static void load_rows(float* to, const GradientTensor& from,
                                                   const std::int64_t* at) {
    const bool direct = from.aligned && from.dtype == DType::fp32;
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kDim / 4; i += kThreads) {
      const int row = i / (kDim / 4), d = i % (kDim / 4) * 4;
      float* const place = to + row * kStride + d;
      if (direct) {
        const bool valid = at[row] != kNoRow && d < from.dim;
        const float* const data = static_cast<const float*>(from.data);
        arch::copy_async(arch::shared_address(place), valid ? data + at[row] + d : data, valid);
      } else {
        *reinterpret_cast<float4*>(place) = load_four(from, at[row], d);
      }
    }
  }

  /// s += A B^T of the warp's owned ones.
  __device__ __forceinline__ static void add_products(Scores& s, const float* own,
                                                      const float* stream) {
    const int g = lane() / 4, t = lane() % 4;
    const float* const a_at = own + (warp() * 16 + g) * kStride + t;
    const float* const b_at = stream + g * kStride + t;
#pragma unroll
    for (int d = 0; d < kDim; d += 8) {
      const std::uint32_t a[4] = {arch::to_tf32(a_at[d]), arch::to_tf32(a_at[d + 8 * kStride]),
                                  arch::to_tf32(a_at[d + 4]),
                                  arch::to_tf32(a_at[d + 4 + 8 * kStride])};
#pragma unroll
      for (int n = 0; n < kStream / 8; ++n) {
        const float* const column = b_at + n * 8 * kStride + d;
        arch::mma_tf32(s[n], a, arch::to_tf32(column[0]), arch::to_tf32(column[4]));
      }
    }
  }

  /// Sums += W X.
  __device__ __forceinline__ static void add_weighed(float (&sums)[kFloats], const Scores& weights,
                                                     const float* rows) {
    const int g = lane() / 4, t = lane() % 4;
    const float* const pair = rows + 2 * t * kStride + g;
    std::uint32_t a[kStream / 8][4];
#pragma unroll
    for (int k = 0; k < kStream / 8; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) a[k][i] = arch::to_tf32(weights[k][i / 2 + i % 2 * 2]);
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      float four[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) four[i] = sums[n * 4 + i];
#pragma unroll
      for (int k = 0; k < kStream / 8; ++k) {
        const float* const b = pair + k * 8 * kStride + n * 8;
        arch::mma_tf32(four, a[k], arch::to_tf32(b[0]), arch::to_tf32(b[kStride]));
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[n * 4 + i] = four[i];
    }
  }

  float* const own_;     // the first operand, then the second one
  float* const stream_;  // the same, for two tiles
};

}  // namespace longspan::kernels::cuda
