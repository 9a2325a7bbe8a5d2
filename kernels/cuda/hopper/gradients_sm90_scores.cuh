// What backward on Hopper does between the products of scores and the weights, and the factors of
// dropout: for both kernels, which differ in which side of a score they own. An instance without
// softcap, ALiBi and dropout has none of this code.
//
// Element i of a thread's scores is of the owned row or key i / 2 % 2, and of the key or row i / 4,
// i % 2 of those that stream by. A weight P = exp2(score - from): `from` has the row's lse and
// takes the bias away. A score that is capped has the slope 1 - tanh^2 by its product, which the
// weight is multiplied by as soon as it is rounded for dv. So dS is the gradient of the product,
// and the slope needs no registers from products to products.
//
// Dropout. A thread draws the words of a row for keys at positions in fours (kernels/dropout.hpp),
// and keeps bits. The scale of the kept ones is a factor of dv, and of dP.
#pragma once

#include <cstdint>

#include "kernels/cuda/hopper/attend_sm90_scores.cuh"
#include "kernels/dropout.hpp"
#include "kernels/gradient_params.hpp"

namespace longspan::kernels::sm90 {

// ---- scores ------------------------------------------------------------------------------------

// A form returns the exponent of a weight, base 2, and the slope of its score by the product, in
// units of the scale.

struct Uncapped {
  float factor;
  __device__ float operator()(float product, float from, float& slope) const {
    slope = 1.0f;
    return fmaf(product, factor, -from);
  }
};

/// A cap in a range of products.
template <class Factor>
struct CappedNear {
  Factor factor;
  float curve;
  __device__ float operator()(float product, float from, float& slope) const {
    const float score = product * factor(product);
    slope = fmaf(score * score, curve, 1.0f);
    return score - from;
  }
};

/// A cap of any product. Its slope is above 0: a weight of 0 is one of a key that is not seen.
struct CappedAnywhere {
  const Softcap& cap;
  __device__ float operator()(float product, float from, float& slope) const {
    constexpr float kLeast = 0x1p-60f;
    const float t = tanh_scaled(product, cap.scale);
    slope = fmaxf(fmaf(-t, t, 1.0f), kLeast);
    return fmaf(t, cap.height, -from);
  }
};

/// Calls run(form) with one that holds for all products.
template <class Run>
__device__ __forceinline__ void with_form(const Softcap& cap, float factor, const Run& run) {
  if (cap.height == 0.0f) return run(Uncapped{factor});
  run(CappedAnywhere{cap});
}
/// The same with one for products of up to `most` (find_most), which a cap reaches.
template <class Run>
__device__ __forceinline__ void with_near_form(const Softcap& cap, float factor, unsigned most,
                                               const Run& run) {
  if (cap.height == 0.0f) return run(Uncapped{factor});
  if (reaches(cap, 0, most)) return run(CappedNear<Polynomial<3>>{{cap.third}, cap.curve});
  run(CappedNear<Quotient>{{cap}, cap.curve});
}

/// The same with one for products of up to `most`, whether a cap reaches them or not.
template <class Run>
__device__ __forceinline__ void with_form(const Softcap& cap, float factor, unsigned most,
                                          const Run& run) {
  if (cap.height == 0.0f || reaches(cap, 2, most)) return with_near_form(cap, factor, most, run);
  run(CappedAnywhere{cap});
}

/// s becomes weights times the slopes of their scores. from(i): of element i; take(i, weights) gets
/// the weights of elements i and i + 1, and may change them.
template <int kCount, class Form, class From, class Take>
__device__ __forceinline__ void weigh_by(float (&s)[kCount], const Form& form, const From& from,
                                         const Take& take) {
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    float weight[2], slope[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) weight[e] = exp2_fast(form(s[i + e], from(i + e), slope[e]));
    take(i, weight);
#pragma unroll
    for (int e = 0; e < 2; ++e) s[i + e] = weight[e] * slope[e];
  }
}

/// What ALiBi adds to a score for a distance of key and row.
__device__ inline float bias_of(const AlibiTerms& terms, float distance) {
  return terms.slope * (terms.two_sided ? -fabsf(distance) : distance);
}

/// The lse of a row without what its bias has more than a distance times the slope (AlibiTerms).
/// index: of the row among the queries.
__device__ inline float lowered(float lse, const RowTerm& term, float lift, int index) {
  return fmaf(-lift, static_cast<float>(index), lse) + term.lse_low;
}

/// ALiBi of a head; without slopes a slope of 0.
__device__ inline AlibiTerms alibi_of(const AttendParams& params, const KeyPositions& keys,
                                      int sequence, int head, int context_len, int index) {
  AlibiTerms terms{};
  if (params.bias.slopes)
    find_alibi(params.bias, params.sees_no_later_key(sequence), keys, sequence, head, context_len,
               index, terms);
  return terms;
}

// ---- dropout -----------------------------------------------------------------------------------

/// Which of `count` keys, at most 64, from local key `first` on keep the weights of a row: bit i
/// that of key first + i. Keys before the first may have anything.
__device__ inline std::uint64_t kept_of(const Dropout& dropout, const DropoutRow& row,
                                        const KeyRuns& runs, int first, int count) {
  std::uint64_t kept = 0;
#pragma unroll 1
  for (int i = 0; i < count;) {
    const int key = first + i;
    const int position = runs.gap == 0 ? runs.start + key : runs.position(key);
    const PhiloxWords words = row.four(position >> 2);
    unsigned four = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) four |= dropout.keeps(words.word[w]) ? 1u << w : 0u;
    const int from = position & 3, drawn = min(4 - from, runs.following(key));
    kept |= std::uint64_t{four >> from & ((1u << drawn) - 1)} << i;
    i += drawn;
  }
  return kept;
}

/// Transposes a matrix of bits: lane i has row i.
__device__ inline std::uint32_t transpose_bits(std::uint32_t row) {
  const unsigned lane = threadIdx.x % 32;
  std::uint32_t low = 0x0000ffff;
#pragma unroll
  for (unsigned step = 16; step > 0; step /= 2, low ^= low << step) {
    const std::uint32_t other = __shfl_xor_sync(0xffffffff, row, static_cast<int>(step));
    row = (lane & step) == 0 ? (row & low) | (other & low) << step
                             : (row & ~low) | (other & ~low) >> step;
  }
  return row;
}

}  // namespace longspan::kernels::sm90
