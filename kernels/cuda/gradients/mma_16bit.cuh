// The products of backward by mma of 16 bits, for heads up to 256.
//
// S and dP of a warp's rows or keys are in its registers; as the result of one
// mma is laid out as the left operand of the next, so are P and dX, rounded to
// 16 bits. Both operands that stream by are loaded by cp.async while the tile
// before them is multiplied.
//
// P and dX of fp16 are scaled by a power of two for each owned one and tile,
// whose sums are scaled back in fp32. So gradients do not underflow, whatever
// the scale of the loss and the number of keys.
#pragma once

#include <type_traits>

#include "kernels/cuda/common/tile.cuh"
#include "kernels/cuda/gradients/mma_tile.cuh"
#include "kernels/cuda/gradients/weight_scale.cuh"

namespace longspan::kernels::cuda {

/// Loads kRows rows into a tile of T, with zeros past the last dim and for
/// kNoRow. Rows of another type are rounded to T.
template <class T, int kDim, int kRows, int kThreads>
__device__ inline void load_rows(std::uint32_t tile, const GradientTensor& from,
                                 const std::int64_t* at) {
  using Layout = SwizzledTile<T, kDim>;
  constexpr DType kType = std::is_same_v<T, __half> ? DType::fp16 : DType::bf16;
  const bool direct = from.aligned && from.dtype == kType;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < kRows * Layout::kChunks; i += kThreads) {
    const int row = i / Layout::kChunks, chunk = i % Layout::kChunks;
    const std::int64_t first = at[row];
    const bool valid = first != kNoRow && chunk * 8 < from.dim;
    const std::uint32_t to = tile + Layout::offset(row, chunk);
    if (direct) {
      const T* const data = static_cast<const T*>(from.data);
      arch::copy_async(to, valid ? data + first + chunk * 8 : data, valid);
      continue;
    }
    const auto element = [&](int d) {
      return valid && d < from.dim ? load_element(from.data, from.dtype, first + d) : 0.0f;
    };
    const auto pair = [&](int n) {
      return arch::pack<T>(element(chunk * 8 + 2 * n), element(chunk * 8 + 2 * n + 1));
    };
    arch::store_shared(to, make_uint4(pair(0), pair(1), pair(2), pair(3)));
  }
}

template <class T, bool kOfRows, int kDim>
class Mma16Gradients : public MmaGradients<kOfRows, kDim, kDim <= 64 ? 64 : 32> {
  using Base = MmaGradients<kOfRows, kDim, kDim <= 64 ? 64 : 32>;
  using Base::lane, Base::warp, Base::work_;
  using typename Base::Scores;
  using Layout = SwizzledTile<T, kDim>;

 public:
  using Base::kOwn, Base::kStream, Base::kThreads, Base::kFloats;
  using typename Base::Work;
  static constexpr int kBlocks = kDim <= 64 ? 3 : kDim <= 128 ? 2 : 1;
  static constexpr int kOwnBytes = kOwn * kDim * 2, kStreamBytes = kStream * kDim * 2;
  static constexpr int kBytes = 2 * kOwnBytes + 4 * kStreamBytes;

  __device__ __forceinline__ Mma16Gradients(const GradientParams& p, const GradientPlan& plan,
                                            const Work& work, std::byte* shared)
      : Base(p, plan, work),
        shared_(shared),
        own_(arch::shared_address(shared)),
        stream_(own_ + 2 * kOwnBytes) {}

  __device__ __forceinline__ void load_owned() {
    this->clear_slopes();
    load_rows<T, kDim, kOwn, kThreads>(own_, this->own_first(), work_.own.first_at);
    load_rows<T, kDim, kOwn, kThreads>(own_ + kOwnBytes, this->own_second(), work_.own.second_at);
    arch::commit_copies();
  }
  __device__ __forceinline__ void load(int number) const {
    if (work_.tiles[number % Work::kTiles].first < 0) return;
    const auto& slots = work_.stream[number % Work::kSlots];
    const std::uint32_t to = stage(number);
    load_rows<T, kDim, kStream, kThreads>(to, this->stream_first(), slots.first_at);
    load_rows<T, kDim, kStream, kThreads>(to + kStreamBytes, this->stream_second(),
                                          slots.second_at);
    arch::commit_copies();
  }
  __device__ __forceinline__ static void wait() { arch::wait_copies<0>(); }

  __device__ __forceinline__ void multiply(const StreamTile& tile, int number,
                                           float (&sums)[kFloats]) {
    const int slot = number % Work::kSlots;
    const std::uint32_t stream = stage(number);
    const bool of_values = this->of_values();
    Scores s = {}, g = {};
    add_products(s, own_, stream);
    if (!of_values) add_products(g, own_ + kOwnBytes, stream + kStreamBytes);
    const std::uint32_t rows = of_values ? stream + kStreamBytes : stream;
    if (this->weigh_all(s, g, tile, slot, of_values)) {
      const std::byte* const at = shared_ + (rows - own_);
      return this->add_seen(sums, s, [at](int j, int n) {
        const T* const pair =
            reinterpret_cast<const T*>(at + Layout::offset(j, n)) + lane() % 4 * 2;
        return make_float2(static_cast<float>(pair[0]), static_cast<float>(pair[1]));
      });
    }
    add_weighed(sums, s, rows);
  }

 private:
  __device__ std::uint32_t stage(int number) const {
    return stream_ + static_cast<std::uint32_t>(number % 2) * 2 * kStreamBytes;
  }

  /// s += A B^T of the warp's owned ones.
  __device__ __forceinline__ static void add_products(Scores& s, std::uint32_t own,
                                                      std::uint32_t stream) {
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      std::uint32_t a[4];
      arch::load_matrices(a, own + Layout::offset(warp() * 16 + lane() % 16, 2 * k + lane() / 16));
#pragma unroll
      for (int n = 0; n < kStream / 8; n += 2) {
        std::uint32_t b[4];
        arch::load_matrices(b, stream + Layout::offset(n * 8 + lane() % 8 + lane() / 16 * 8,
                                                       2 * k + lane() / 8 % 2));
        arch::mma<T>(s[n], a, b[0], b[1]);
        arch::mma<T>(s[n + 1], a, b[2], b[3]);
      }
    }
  }

  /// Sums += W X.
  __device__ __forceinline__ static void add_weighed(float (&sums)[kFloats], const Scores& weights,
                                                     std::uint32_t rows) {
    constexpr bool kScales = std::is_same_v<T, __half>;
    float to[2] = {1.0f, 1.0f}, back[2] = {1.0f, 1.0f};
    if constexpr (kScales) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float most = 0.0f;
#pragma unroll
        for (int n = 0; n < kStream / 8; ++n)
          most = fmaxf(most, fmaxf(fabsf(weights[n][2 * half]), fabsf(weights[n][2 * half + 1])));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        const WeightScale scale(most);
        to[half] = scale.to;
        back[half] = scale.back;
      }
    }
    std::uint32_t a[kStream / 16][4];
#pragma unroll
    for (int k = 0; k < kStream / 16; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const pair = weights[2 * k + i / 2] + i % 2 * 2;
        a[k][i] = kScales ? arch::pack<T>(pair[0] * to[i % 2], pair[1] * to[i % 2])
                          : arch::pack<T>(pair[0], pair[1]);
      }
#pragma unroll
    for (int n = 0; n < kDim / 8; n += 2) {
      float both[2][4] = {};
      if constexpr (!kScales) {
#pragma unroll
        for (int i = 0; i < 8; ++i) both[i / 4][i % 4] = sums[n * 4 + i];
      }
#pragma unroll
      for (int k = 0; k < kStream / 16; ++k) {
        std::uint32_t b[4];
        arch::load_matrices_transposed(
            b, rows + Layout::offset(k * 16 + lane() % 16, n + lane() / 16));
        arch::mma<T>(both[0], a[k], b[0], b[1]);
        arch::mma<T>(both[1], a[k], b[2], b[3]);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& sum = sums[n * 4 + i];
        sum = kScales ? fmaf(both[i / 4][i % 4], back[i % 4 / 2], sum) : both[i / 4][i % 4];
      }
    }
  }

  const std::byte* const shared_;
  const std::uint32_t own_;     // the first operand, then the second one
  const std::uint32_t stream_;  // the same, for two tiles
};

template <class T>
GradientKernel gradients_16bit(bool rows_own, int dim) {
  const auto of = [rows_own](auto size) {
    constexpr int kDim = decltype(size)::value;
    return rows_own ? gradient_kernel<Mma16Gradients<T, true, kDim>>()
                    : gradient_kernel<Mma16Gradients<T, false, kDim>>();
  };
  if (dim <= 64) return of(std::integral_constant<int, 64>{});
  if (dim <= 128) return of(std::integral_constant<int, 128>{});
  return of(std::integral_constant<int, 256>{});
}

}  // namespace longspan::kernels::cuda
