// Backward on Hopper. The parameters of backward (kernels/gradient_params.hpp) have the
// mathematics. Two kernels each own what they add up, in the registers of their consumers, and let
// the rest stream by:
//
//     kernel                       owns            streams       products
//     gradients_sm90_rows.cuh      64 rows, dq     keys          S, dP; dq += dS K
//     gradients_sm90_keys.cuh      64 keys, dk dv  rows          S, dP transposed; dv += P dout,
//                                                                dk += dS Q
//
// That is 7 products where a kernel that adds up dq in global memory has 5, but sums need no
// atomics, have one order, and no order has to be waited for. Rows are made by the scheduler of
// forward (attend_sm90_scheduler.cuh), whose work tiles, barriers and memory the first kernel
// extends.
//
// P and dS stay in registers: a thread's scores are exactly the elements that it must hold of the
// next product's operand. So the second kernel computes S and dP transposed. A consumer has its
// products in flight while it weighs: those of dP beside the exponentials, those of the sums beside
// the next scores.
//
// This file has what both share: products, the terms of rows, and what is not finite. NaN and
// infinity must reach only those who see them, but 0 NaN is NaN, and a tile that the mask cuts has
// weights of 0. A row is marked if its terms are not finite, as those of every row are that has
// seen such a number. In marked tiles those elements are made 0 before the product, and the sums of
// those who see them NaN.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/arch/sm90.cuh"
#include "kernels/cuda/arch/store_same.cuh"
#include "kernels/cuda/gradients/weight_scale.cuh"
#include "kernels/cuda/hopper/attend_sm90_block.cuh"
#include "kernels/cuda/hopper/attend_sm90_softmax.cuh"
#include "kernels/gradient_params.hpp"

namespace longspan::kernels::sm90 {

/// A tile in shared memory: panels of 128 bytes of [kRows] rows.
template <class Element, int kPanels, int kRows>
using TilePanels = Element[kPanels][kRows][64];

/// D[64, kN] = A[64, kDim] B[kN, kDim]^T, asynchronously.
template <int kDim, class Element, int kPanels, int kN>
__device__ __forceinline__ void multiply_rows(float (&d)[kN / 2],
                                              const TilePanels<Element, kPanels, 64>& own,
                                              const TilePanels<Element, kPanels, kN>& stream) {
  const std::uint64_t a = opaque(operand(own, 64 * 128)), b = operand(stream, kN * 128);
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step)
    Product<kN>::template shared<Element, false>(d, advance(a, step / 4 * 64 * 128 + step % 4 * 32),
                                                 advance(b, step / 4 * kN * 128 + step % 4 * 32),
                                                 step > 0);
}

/// D[64, kDim] += W[64, kN] X[kN, kDim], asynchronously, with W in registers.
template <int kDim, class Element, int kPanels, int kN>
__device__ __forceinline__ void multiply_weights(float (&d)[kDim / 2],
                                                 const std::uint32_t (&weights)[kN / 16][4],
                                                 const TilePanels<Element, kPanels, kN>& x,
                                                 bool add = true) {
  const std::uint64_t b = operand(x, kN * 128);
#pragma unroll
  for (int step = 0; step < kN / 16; ++step)
    Product<kDim>::template registers<Element, true>(d, weights[step], advance(b, step * 16 * 128),
                                                     true);
}

// ---- rows --------------------------------------------------------------------------------------

/// Returns the factors of a row, and in `marked` whether it may have elements that are not finite.
/// Two roundings of lse are as good as one: weights are rounded to 16 bits.
__device__ inline RowFactors factors_of(const RowTerm& term, bool& marked) {
  const bool none = term.lse == -INFINITY;
  const bool finite = fabsf(term.lse) < INFINITY && fabsf(term.d) < INFINITY;
  marked = !finite;
  if (none) return {INFINITY, 0.0f};
  return {fabsf(term.lse) < INFINITY ? term.lse : NAN, term.d};
}

/// The exponent of a factor of P for dv. P is at most 1, and of fp16 it is scaled as far as dS.
template <class Element>
inline constexpr int kWeightExponent = std::is_same_v<Element, __half> ? 14 : 0;

/// The factors of dS of a thread's two rows or keys, each the power of two that the largest dS so
/// far allows fp16. bf16 needs none.
template <class Element>
class SumScales {
 public:
  static constexpr bool kAny = true;
  /// Scales dS, and what was added up before by what the factors become less. No product may be in
  /// flight that adds to the sums.
  template <int kCount, int kSums>
  __device__ __forceinline__ void apply(float (&s)[kCount], float (&sums)[kSums]) {
    float most[2] = {0, 0}, ratio[2] = {1, 1};
#pragma unroll
    for (int i = 0; i < kCount; ++i) most[i / 2 % 2] = fmaxf(most[i / 2 % 2], fabsf(s[i]));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      most[h] = fmaxf(most[h], __shfl_xor_sync(0xffffffff, most[h], 1));
      most[h] = fmaxf(most[h], __shfl_xor_sync(0xffffffff, most[h], 2));
      if (most[h] * scale_[h] < 0x1p15f) continue;
      const float scale = cuda::WeightScale(most[h]).to;
      ratio[h] = scale / scale_[h];
      scale_[h] = scale;
    }
    if (__any_sync(0xffffffff, ratio[0] != 1.0f || ratio[1] != 1.0f)) rescale(sums, ratio);
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] *= scale_[i / 2 % 2];
  }
  /// Scales the sums back; the next ones start anew.
  template <int kSums>
  __device__ __forceinline__ void end(float (&sums)[kSums]) {
    const float back[2] = {1 / scale_[0], 1 / scale_[1]};
    rescale(sums, back);
    scale_[0] = scale_[1] = kMost;
  }

 private:
  static constexpr float kMost = 0x1p100f;
  float scale_[2] = {kMost, kMost};
};
template <>
class SumScales<__nv_bfloat16> {
 public:
  static constexpr bool kAny = false;
  template <int kCount, int kSums>
  __device__ __forceinline__ void apply(float (&)[kCount], float (&)[kSums]) {}
  template <int kSums>
  __device__ __forceinline__ void end(float (&)[kSums]) {}
};

// ---- what is not finite ------------------------------------------------------------------------

__device__ inline bool is_finite(float x) { return fabsf(x) < INFINITY; }

/// The address of element `column`, an even one, of row `row` of a tile, where the swizzle puts it.
template <class Element, int kPanels, int kRows>
__device__ inline std::uint32_t& pair_at(TilePanels<Element, kPanels, kRows>& tile, int row,
                                         int column) {
  const int chunk = (column / 8 % 8) ^ (row % 8);
  return *reinterpret_cast<std::uint32_t*>(&tile[column / 64][row][chunk * 8 + column % 8]);
}

/// Whether one of the two elements of a word is not finite: bit 0 the first, bit 1 the second.
template <class Element>
__device__ inline unsigned infinite_of(std::uint32_t pair) {
  const Element(&both)[2] = reinterpret_cast<const Element(&)[2]>(pair);
  return (is_finite(static_cast<float>(both[0])) ? 0u : 1u) |
         (is_finite(static_cast<float>(both[1])) ? 0u : 2u);
}

/// A thread's sums that are NaN: bit i for element i. Bits are in memory, so that the loop over
/// tiles needs no registers for them, and no sums are changed while products are in flight.
using NanBits = std::uint64_t;
/// The words of them for sums of a width. Each is of 128 columns.
constexpr int nan_words(int dim) { return (dim + 127) / 128; }

/// Returns which of a thread's sums see an element that is not finite, in kDim columns from `first`
/// on. sees(h, i): whether the thread's row h of the sums sees row i of the tile.
template <int kDim, class Element, int kPanels, int kRows, class Sees>
__device__ NanBits nan_of(TilePanels<Element, kPanels, kRows>& tile, int count, const Sees& sees,
                          int first = 0) {
  static_assert(kDim / 2 <= 64);
  const int t = static_cast<int>(threadIdx.x % 4);
  NanBits found = 0;
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const unsigned seen = (sees(0, i) ? 3u : 0u) | (sees(1, i) ? 12u : 0u);
    if (seen == 0) continue;
#pragma unroll 1
    for (int n = 0; n < kDim / 8; ++n) {
      const unsigned infinite = infinite_of<Element>(pair_at(tile, i, first + 8 * n + 2 * t));
      found |= NanBits{(infinite | infinite << 2) & seen} << 4 * n;
    }
  }
  return found;
}
template <int kCount>
__device__ __forceinline__ void set_nan(float (&sums)[kCount], NanBits bits, int word = 0) {
  if (bits == 0) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (i / 64 == word && (bits >> i % 64 & 1) != 0) sums[i] = NAN;
}
/// The same for sums of any width, whose bits are in words of 128 columns.
template <int kDim, class Element, int kPanels, int kRows, class Sees>
__device__ void add_nan(volatile NanBits (&bits)[nan_words(kDim)],
                        TilePanels<Element, kPanels, kRows>& tile, int count, const Sees& sees) {
  bits[0] = bits[0] | nan_of<(kDim < 128 ? kDim : 128)>(tile, count, sees);
  if constexpr (kDim > 128) bits[1] = bits[1] | nan_of<kDim - 128>(tile, count, sees, 128);
}
template <int kCount>
__device__ __forceinline__ void set_all_nan(float (&sums)[kCount],
                                            const volatile NanBits (&bits)[nan_words(2 * kCount)]) {
#pragma unroll
  for (int i = 0; i < nan_words(2 * kCount); ++i) set_nan(sums, bits[i], i);
}

/// kThreads threads, numbered from 0, make elements that are not finite 0.
template <int kThreads, class Element, int kPanels, int kRows>
__device__ void clear_infinite(TilePanels<Element, kPanels, kRows>& tile, int thread) {
  auto* const words = reinterpret_cast<std::uint32_t*>(tile);
#pragma unroll 1
  for (int i = thread; i < kPanels * kRows * 32; i += kThreads) {
    const unsigned infinite = infinite_of<Element>(words[i]);
    if (infinite != 0)
      words[i] &= ((infinite & 1) != 0 ? 0u : 0xffffu) | ((infinite & 2) != 0 ? 0u : 0xffff0000u);
  }
}

/// Rows [first, first + count) of a tile become 0. All threads of a warpgroup call this.
template <class Element, int kPanels, int kRows>
__device__ void clear_rows(TilePanels<Element, kPanels, kRows>& tile, int first, int count) {
#pragma unroll 1
  for (int panel = 0; panel < kPanels; ++panel)
#pragma unroll 1
    for (int i = threadIdx.x % 128; i < count * 8; i += 128)
      store_same(reinterpret_cast<uint4*>(tile[panel][first])[i], uint4{});
}

/// Adds a thread's part of 64 rows of sums to memory, or writes it there. to(h): its row h, or
/// null.
template <int kDim, class To>
__device__ __forceinline__ void store_sums(const float (&sums)[kDim / 2], float factor, int columns,
                                           bool resume, const To& to) {
  const int t = static_cast<int>(threadIdx.x % 4);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float* const row = to(h);
    if (row == nullptr) continue;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      if (8 * n >= columns) break;
      float2 sum{sums[4 * n + 2 * h] * factor, sums[4 * n + 2 * h + 1] * factor};
      float2& at = *reinterpret_cast<float2*>(row + 8 * n + 2 * t);
      if (resume) {
        const float2 before = at;
        sum = {before.x + sum.x, before.y + sum.y};
      }
      at = sum;
    }
  }
}

/// Stores a thread's part of 64 rows of sums, rounded. to(h): its row h, or null.
template <class Element, int kDim, class To>
__device__ __forceinline__ void store_rounded(const float (&sums)[kDim / 2], float factor,
                                              int columns, const To& to) {
  const int t = static_cast<int>(threadIdx.x % 4);
  const bool odd = t % 2 != 0;
  // Which of the zeros a sum is does not count (StoreGradientParams).
  const auto rounded = [&](int i) {
    return pack(fmaf(sums[i], factor, 0.0f), fmaf(sums[i + 1], factor, 0.0f), Element{});
  };
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    Element* const row = to(h);
#pragma unroll
    for (int n = 0; n < kDim / 8; n += 2) {
      // Two lanes swap, so that each has 8 bytes and four have all of a sector.
      const std::uint32_t first = rounded(4 * n + 2 * h), second = rounded(4 * n + 4 + 2 * h);
      const std::uint32_t other = __shfl_xor_sync(~0u, odd ? first : second, 1);
      const int column = 8 * (n + (odd ? 1 : 0)) + t / 2 * 4;
      if (row != nullptr && column < columns)
        *reinterpret_cast<uint2*>(row + column) = odd ? uint2{other, second} : uint2{first, other};
    }
  }
}

}  // namespace longspan::kernels::sm90
