// What the Hopper kernel makes of the products of a tile before their softmax: softcap and ALiBi,
// in the meaning of score.hpp. An instance without them holds none of this.
//
// Softcap. tanh is an odd polynomial while no score of a warp's tile comes near the cap: seven
// operations a score beside the softmax's own. Else it is a quotient of two polynomials, with a
// reciprocal. Both are right to 4e-7 of the score, near 0 as well, so that a row of one visible key
// has its lse to single precision; the hardware's tanh.approx is off by 2^-11, and
// 1 - 2 / (1 + exp(2 x)) by 2^-24 of the cap, which is more than a small score may be.
//
// ALiBi. Where a tile's keys stand in an arithmetic progression (a run of a contiguous or zigzag
// shard, a block of an interleaved one, any tile of a striped one) what a row adds is one too, and
// costs three operations a score. Other tiles look their positions up.
#pragma once

#include <climits>

#include "kernels/cuda/attend_sm90_block.cuh"

namespace longspan::kernels::sm90 {

// ---- softcap ---------------------------------------------------------------------------------

/// tanh(scale s) for any s, to 4e-7 of itself. P / Q is the best quotient of degrees 4 and 4 in x^2
/// for |x| <= 8.7, off by 1.5e-8; there tanh is 1 within half an ulp. NaN stays NaN.
__device__ inline float tanh_scaled(float s, float scale) {
  constexpr float kOne = 8.7f;
  float x = s * scale;
  x = fabsf(x) > kOne ? copysignf(kOne, x) : x;
  const float z = x * x;
  float p = fmaf(z, 1.38974910e-08f, 2.09937290e-05f);
  p = fmaf(z, p, 3.51873762e-03f);
  p = fmaf(z, p, 1.34004613e-01f);
  p = fmaf(z, p, 9.99999985e-01f);
  float q = fmaf(z, 7.99646922e-07f, 3.32363758e-04f);
  q = fmaf(z, q, 2.59648695e-02f);
  q = fmaf(z, q, 4.67337815e-01f);
  q = fmaf(z, q, 1.0f);
  return x * p * approximate_reciprocal(q);
}

/// tanh(scale s) for |s| <= cap.near.
__device__ inline float tanh_near(float s, const Softcap& cap) {
  const float z = s * s;
  float p = fmaf(z, cap.terms[4], cap.terms[3]);
#pragma unroll
  for (int term = 2; term >= 0; --term) p = fmaf(z, p, cap.terms[term]);
  return s * p;
}

/// s becomes tanh(scale s). Which way it goes, and so its last bits, is decided by what the warp's
/// rows see, and by nothing that lies beside: what is hidden is 0 here, and of the thread's rows, r
/// and r + 8, those count that exist. rows: of the item, from r on.
template <int kCount>
__device__ void cap_scores(float (&s)[kCount], const Softcap& cap, int rows) {
  constexpr int kPiece = 8;
  static_assert(kCount % kPiece == 0);
  const auto beyond = [&](int begin, int end) {  // for some lane of the warp
    float most[2] = {0, 0};
#pragma unroll
    for (int i = begin; i < end; ++i) most[i / 2 % 2] = fmaxf(most[i / 2 % 2], fabsf(s[i]));
    return __any_sync(0xffffffff,
                      (rows > 0 && most[0] > cap.near) || (rows > 8 && most[1] > cap.near));
  };
  if (!beyond(0, kCount)) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] = tanh_near(s[i], cap);
    return;
  }
  // By the piece, so that few of its numbers need registers at a time.
#pragma unroll
  for (int i = 0; i < kCount; i += kPiece) {
    if (beyond(i, i + kPiece)) {
#pragma unroll
      for (int j = i; j < i + kPiece; ++j) s[j] = tanh_scaled(s[j], cap.scale);
    } else {
#pragma unroll
      for (int j = i; j < i + kPiece; ++j) s[j] = tanh_near(s[j], cap);
    }
  }
}

// ---- ALiBi -----------------------------------------------------------------------------------

/// One thread: what an item's consumers must know. `position`: of its first row; the places are
/// those of its sequence.
__device__ inline void find_alibi(const Bias& bias, bool causal, const Places& places, int head,
                                  int position, AlibiItem& item) {
  item.slope = bias.slopes[head] * kLog2E;
  Line& line = item.line;
  if (places.block > 0) {
    line = {places.start[0], places.block, places.round - places.block, INT_MAX};
  } else if (places.count[0] > 0 && places.count[1] > 0) {
    line = {places.start[0], places.count[0], places.start[1] - places.start[0] - places.count[0],
            1};
  } else {
    line = {places.start[places.count[0] == 0], INT_MAX, 0, 0};
  }
  item.lift = bias.alibi == Alibi::context ? item.slope : 0.0f;
  item.two_sided = bias.alibi == Alibi::query && !causal;
  item.position = position;
}

/// s becomes c s + bias, in base 2, for the tile at local key `first`. `row`: the thread's first
/// of the item; `group_row`: that of its warpgroup, which calls this together.
template <class T>
__device__ void add_alibi(float (&s)[T::kKeys / 2], float c, const AlibiItem& item,
                          int (&positions)[T::kKeys], int first, int row, int group_row,
                          int barrier) {
  constexpr int kKeys = T::kKeys;
  const Line line = item.line;
  const int t = threadIdx.x % 4;
  const int own = item.position + row;
  const int lowest = item.position + group_row, highest = lowest + 63;

  // Keys before the first of all are hidden, and whatever is said of them does not matter.
  int from = line.start + first, step = 1;
  bool straight = true;
  if (line.run == 1) {
    step = 1 + line.gap;
    from = line.start + first * step;
  } else if (line.gap != 0) {
    const int gaps = min(max(first, 0) / line.run, line.gaps);
    from += gaps * line.gap;
    straight = gaps == line.gaps || first + kKeys <= (gaps + 1) * line.run;
  }
  const bool before = from + step * (kKeys - 1) <= lowest, behind = from >= highest;
  if (straight && (!item.two_sided || before || behind)) {
    const float slope = item.two_sided && !before ? -item.slope : item.slope;
    const float stride = static_cast<float>(step);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Distances are whole numbers and come out exact, so a bias is off by a part of its own size.
      const float distance = static_cast<float>(from + step * 2 * t - own - 8 * h);
#pragma unroll
      for (int i = 2 * h; i < kKeys / 2; i += 4) {
        s[i] = fmaf(s[i], c, slope * fmaf(stride, i / 4 * 8.0f, distance));
        s[i + 1] = fmaf(s[i + 1], c, slope * fmaf(stride, i / 4 * 8.0f + 1.0f, distance));
      }
    }
    return;
  }

  named_sync(barrier, 128);  // the tile before is through with its positions
  for (int i = threadIdx.x % 128; i < kKeys; i += 128)
    positions[i] = line.position(max(first + i, 0));
  named_sync(barrier, 128);
#pragma unroll
  for (int i = 0; i < kKeys / 2; i += 4) {
    const int2 pair = *reinterpret_cast<const int2*>(&positions[i / 4 * 8 + 2 * t]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float distance = static_cast<float>((j % 2 ? pair.y : pair.x) - own - j / 2 * 8);
      s[i + j] = fmaf(s[i + j], c, item.slope * (item.two_sided ? -fabsf(distance) : distance));
    }
  }
}

// ---- the instances ---------------------------------------------------------------------------

template <class T>
__device__ bool is_capped(const Call& call) {
  return T::kScores == Scores::softcap ||
         (T::kScores == Scores::any && call.softcap.height != 0.0f);
}

/// What makes a score, base 2, of a product or of its tanh.
template <class T>
__device__ float score_factor(const Call& call) {
  return is_capped<T>(call) ? call.softcap.height : call.params.score.scale * kLog2E;
}

/// A row's maximum as it is handed out. row: of the item.
template <class T>
__device__ float lifted(float max, const Shared<T>& shared, int stage, int row) {
  if constexpr (T::kScores == Scores::any)
    max = fmaf(shared.alibi.items[stage].lift, static_cast<float>(shared.items[stage].row + row),
               max);
  return max;
}

/// The reverse, for a maximum that comes in. The product is exact, and so is the small difference
/// of two large numbers: what rounding the lifted maximum cost is all that is lost.
template <class T>
__device__ float lowered(float max, const Shared<T>& shared, int stage, int row) {
  if constexpr (T::kScores == Scores::any)
    max = fmaf(-shared.alibi.items[stage].lift, static_cast<float>(shared.items[stage].row + row),
               max);
  return max;
}

}  // namespace longspan::kernels::sm90
