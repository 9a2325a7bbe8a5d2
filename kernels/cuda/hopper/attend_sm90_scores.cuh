// Softcap and ALiBi in the Hopper kernel, applied to the products of a tile before their softmax,
// as defined in score.hpp. An instance without them has none of this code.
//
// Softcap. tanh is an odd function, x times a function of x^2. While no score of a warp's tile is
// far from 0, that function is short: a polynomial of degree 2 or 4, or a quotient of degrees 2 and
// 3. It includes the score's factor in its terms and replaces that factor in the exponential's
// argument, so a score costs three, five or eight operations besides the softmax's own. The row's
// maximum is found before: tanh keeps the order. Tiles that a mask cuts, and scores beyond, become
// tanh in place, which takes six operations or twenty. All forms are accurate to 4e-7 of the score,
// near 0 as well, so that a row of one visible key has its lse to single precision. The hardware's
// tanh.approx has an error of 2^-11, and 1 - 2 / (1 + exp(2 x)) one of 2^-24 of the cap, which is
// more than a small score may be.
//
// ALiBi. If the positions of a tile's keys are an arithmetic progression (a run of a contiguous or
// zigzag shard, a block of an interleaved one, any tile of a striped one), so is the bias of a row.
// Far from the rows it is computed once for a thread's two rows and costs one and a half operations
// a score, near them three, each from its own distance. Other tiles look their positions up.
#pragma once

#include <climits>

#include "kernels/cuda/hopper/attend_sm90_block.cuh"

namespace longspan::kernels::sm90 {

/// Returns `holds`, which is the same in all lanes; the compiler then knows that it is.
__device__ inline bool uniform(bool holds) { return __any_sync(0xffffffff, holds); }

// ---- the largest score of a row ---------------------------------------------------------------

// Floats of one sign are in the order of their bits, and one operation compares three integers:
// half as many operations as there are scores.

struct Most {  // floats above 0, or NaN; any of them exceeds all below 0
  __device__ int operator()(int a, int b, int c) const { return __vimax3_s32(a, b, c); }
};
struct LeastBelow {  // floats below 0, if there are no others
  __device__ int operator()(int a, int b, int c) const {
    return static_cast<int>(__vimin3_u32(a, b, c));
  }
};
struct MostBelow {  // the one furthest below 0, if there is one; else the largest
  __device__ int operator()(int a, int b, int c) const {
    return static_cast<int>(__vimax3_u32(a, b, c));
  }
};

/// Reduces this thread's scores of row h.
template <class Pick, int kCount>
__device__ int pick_own(const float (&s)[kCount], int h) {
  int best = __float_as_int(s[2 * h]);
#pragma unroll
  for (int i = 2 * h; i < kCount; i += 4)
    best = Pick{}(best, __float_as_int(s[i]), __float_as_int(s[i + 1]));
  return best;
}

/// Reduces over the four lanes that share a row.
template <class Pick>
__device__ int pick_of_quad(int best) {
#pragma unroll
  for (int apart = 1; apart < 4; apart *= 2) {
    const int other = __shfl_xor_sync(0xffffffff, best, apart);
    best = Pick{}(best, other, other);
  }
  return best;
}

/// Finds the largest score of each of a thread's rows. below: rows are expected to be all below 0,
/// so that case is tested first. NaN may or may not count.
template <int kCount>
__device__ void find_tops(const float (&s)[kCount], bool below, float (&top)[2]) {
  int found[2] = {0, 0};
  bool wanting = true;  // for some row of the warp
  if (!below) {
#pragma unroll
    for (int h = 0; h < 2; ++h) found[h] = pick_of_quad<Most>(pick_own<Most>(s, h));
    wanting = __any_sync(0xffffffff, (found[0] | found[1]) < 0);
  }
  if (wanting) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int least = pick_of_quad<LeastBelow>(pick_own<LeastBelow>(s, h));
      found[h] = below || found[h] < 0 ? least : found[h];
    }
    if (below && __any_sync(0xffffffff, (found[0] & found[1]) >= 0)) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int most = pick_of_quad<Most>(pick_own<Most>(s, h));
        found[h] = most < 0 ? found[h] : most;
      }
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) top[h] = __int_as_float(found[h]);
}

// ---- softcap ---------------------------------------------------------------------------------

/// tanh(scale s) for any s, to 4e-7 of itself. P / Q is the best quotient of degrees 4 and 4 in x^2
/// for |x| <= 8.7, with an error of 1.5e-8; there tanh is 1 within half an ulp. NaN stays NaN.
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

/// s becomes tanh(scale s). The form, and so its last bits, depends only on what the warp's rows
/// see: masked scores are 0 here, and of the thread's rows, r and r + 8, only those that exist
/// count. rows: of the work tile, from r on.
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
  // In pieces, so that few of its numbers need registers at a time.
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

// A factor makes a score of a product: the score, base 2, is the product times its factor.

struct Constant {
  float factor;
  __device__ float operator()(float) const { return factor; }
};

/// A polynomial of degree 2 or 4 in x^2.
template <int kTerms>
struct Polynomial {
  const float (&terms)[kTerms];
  __device__ float operator()(float x) const {
    const float z = x * x;
    float p = fmaf(z, terms[kTerms - 1], terms[kTerms - 2]);
#pragma unroll
    for (int term = kTerms - 3; term >= 0; --term) p = fmaf(z, p, terms[term]);
    return p;
  }
};

struct Quotient {
  const Softcap& cap;
  __device__ float operator()(float x) const {
    const float z = x * x;
    const float p = fmaf(z, fmaf(z, cap.above[2], cap.above[1]), cap.above[0]);
    float q = fmaf(z, cap.below[2], cap.below[1]);
    q = fmaf(z, q, cap.below[0]);
    return p * approximate_reciprocal(fmaf(z, q, 1.0f));
  }
};

/// Products s become scores, base 2.
template <int kCount, class Factor>
__device__ void scale_by(float (&s)[kCount], const Factor& factor) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) s[i] *= factor(s[i]);
}

/// Returns the largest magnitude in the warp's tile, as its bits; NaN is above all numbers. `own`:
/// that of this thread's scores of each row; rows: as for cap_scores.
__device__ inline unsigned most_of_warp(const int (&own)[2], int rows) {
  const int most = max(rows > 0 ? own[0] : 0, rows > 8 ? own[1] : 0);
  return __reduce_max_sync(0xffffffff, static_cast<unsigned>(most));
}

/// The same for a tile that no mask cuts.
template <int kCount>
__device__ unsigned find_most(const float (&s)[kCount], int rows) {
  int own[2];
#pragma unroll
  for (int h = 0; h < 2; ++h)
    own[h] = max(pick_own<Most>(s, h), pick_own<MostBelow>(s, h) & INT_MAX);
  return most_of_warp(own, rows);
}

/// The same, and the largest product of each row, which may be anything if there is a NaN.
template <int kCount>
__device__ unsigned find_most(const float (&s)[kCount], int rows, float (&top)[2]) {
  int found[2], own[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    found[h] = pick_own<Most>(s, h);
    own[h] = max(found[h], pick_own<MostBelow>(s, h) & INT_MAX);
  }
  const unsigned most = most_of_warp(own, rows);
#pragma unroll
  for (int h = 0; h < 2; ++h) found[h] = pick_of_quad<Most>(found[h]);
  if (__any_sync(0xffffffff, (found[0] | found[1]) < 0)) {  // all of a row below 0
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int least = pick_of_quad<LeastBelow>(pick_own<LeastBelow>(s, h));
      found[h] = found[h] < 0 ? least : found[h];
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) top[h] = __int_as_float(found[h]);
  return most;
}

/// Whether form i of the cap holds for magnitudes up to `most`.
__device__ inline bool reaches(const Softcap& cap, int i, unsigned most) {
  return most <= static_cast<unsigned>(__float_as_int(cap.reach[i]));
}

// ---- ALiBi -----------------------------------------------------------------------------------

/// The positions of keys as runs at equal distances.
__device__ inline KeyRuns runs_of(const KeyPositions& keys) {
  if (keys.block > 0) return {keys.start[0], keys.block, keys.round - keys.block, INT_MAX};
  if (keys.count[0] > 0 && keys.count[1] > 0)
    return {keys.start[0], keys.count[0], keys.start[1] - keys.start[0] - keys.count[0], 1};
  return {keys.start[keys.count[0] == 0], INT_MAX, 0, 0};
}

/// One thread computes what a work tile's consumers need. `index`: of its first row among the
/// queries of its sequence; `keys`: the positions of its keys.
__device__ inline void find_alibi(const Bias& bias, bool causal, const KeyPositions& keys,
                                  int sequence, int head, int context_len, int index,
                                  AlibiTerms& terms) {
  terms.slope = bias.slopes.of(sequence, head) * kLog2E;
  terms.runs = runs_of(keys);
  terms.lift = bias.alibi == Alibi::context ? terms.slope : 0.0f;
  terms.two_sided = bias.alibi == Alibi::query && !causal;
  terms.index = index;
  terms.position = context_len + index;
}

/// How a tile gets its bias. Distances are counted from a thread's own row.
struct AlibiTile {
  bool straight;  // positions of keys at equal steps, all on one side of the rows
  bool far;       // straight, and at least as far from the rows as a tile is long
  bool below;     // far, and scores are expected to be below 0
  float slope;    // base 2, of the straight ones
  int from;       // position of the first key
  int step;
};

/// Describes the tile at local key `first`. group_row: the warpgroup's first row, in the work tile.
template <class T>
__device__ AlibiTile find_tile(const AlibiTerms& terms, int first, int group_row) {
  constexpr int kKeys = T::kKeys;
  const KeyRuns runs = terms.runs;
  const int lowest = terms.position + group_row, highest = lowest + 63;

  // Keys before the first of all are masked, so their values do not matter.
  AlibiTile tile{};
  int step = 1;
  bool straight = true;
  tile.from = runs.start + first;
  if (uniform(runs.gap != 0)) {
    if (uniform(runs.run == 1 && runs.gaps == INT_MAX)) {
      step = 1 + runs.gap;
      tile.from = runs.start + first * step;
    } else {
      const int gaps = min(max(first, 0) / runs.run, runs.gaps);
      tile.from += gaps * runs.gap;
      straight = gaps == runs.gaps || first + kKeys <= (gaps + 1) * runs.run;
    }
  }
  const int ahead = lowest - (tile.from + step * (kKeys - 1));  // of the rows, the last key
  const int behind = tile.from - highest;
  const int nearest = max(ahead, behind);
  tile.straight = uniform(straight && (!terms.two_sided || nearest >= 0));
  tile.far = uniform(straight && nearest >= step * kKeys);
  tile.slope = terms.two_sided && ahead < 0 ? -terms.slope : terms.slope;
  tile.step = step;
  constexpr float kClear = -8.0f;  // in base 2, of a bias that decides
  tile.below = uniform(tile.slope * static_cast<float>(ahead >= 0 ? -nearest : nearest) < kClear) &&
               tile.far;
  return tile;
}

/// s becomes c s + bias, in base 2, for a far tile. The bias is that of the thread's first row
/// (`row` of the work tile), and for its second row, 8 further on, too high by `less`.
template <class T>
__device__ void add_far(float (&s)[T::kKeys / 2], float c, const AlibiTerms& terms,
                        const AlibiTile& tile, int row, float& less) {
  constexpr int kKeys = T::kKeys, kMiddle = kKeys / 2;
  const int t = threadIdx.x % 4;
  // A tile's distance rounds by less than twice what one key's would.
  const int middle = tile.from + tile.step * (kMiddle + 2 * t);
  const float bias = tile.slope * static_cast<float>(middle - (terms.position + row));
  const float stride = tile.slope * static_cast<float>(tile.step);
  less = tile.slope * 8.0f;
#pragma unroll
  for (int i = 0; i < kKeys / 2; i += 4) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float column = fmaf(stride, static_cast<float>(i / 4 * 8 + j - kMiddle), bias);
      s[i + j] = fmaf(s[i + j], c, column);
      s[i + j + 2] = fmaf(s[i + j + 2], c, column);
    }
  }
}

/// A warpgroup finds the positions of the keys of the tile at local key `first`.
template <int kKeys>
__device__ void find_positions(const KeyRuns& of_keys, int (&positions)[kKeys], int first,
                               int barrier) {
  const KeyRuns runs = of_keys;
  named_sync(barrier, 128);  // the tile before is through with its positions
#pragma unroll
  for (int i = 0; i < kKeys; i += 128) {
    const int key = i + static_cast<int>(threadIdx.x % 128);
    if (key < kKeys) positions[key] = runs.position(max(first + key, 0));
  }
  named_sync(barrier, 128);
}

/// s becomes c s + bias, in base 2, for the tile at local key `first`; less: as in add_far. `row`:
/// the thread's first of the work tile. The warpgroup does it together.
template <class T>
__device__ void add_alibi(float (&s)[T::kKeys / 2], float c, const AlibiTerms& terms,
                          const AlibiTile& tile, int (&positions)[T::kKeys], int first, int row,
                          int barrier, float& less) {
  constexpr int kKeys = T::kKeys;
  const int t = threadIdx.x % 4;
  const int own = terms.position + row;
  if (tile.far) return add_far<T>(s, c, terms, tile, row, less);
  if (tile.straight) {
    const float step = static_cast<float>(tile.step);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Distances are integers and exact, so the error of a bias is relative to its own size.
      const float distance = static_cast<float>(tile.from + tile.step * 2 * t - own - 8 * h);
#pragma unroll
      for (int i = 2 * h; i < kKeys / 2; i += 4) {
        s[i] = fmaf(s[i], c, tile.slope * fmaf(step, i / 4 * 8.0f, distance));
        s[i + 1] = fmaf(s[i + 1], c, tile.slope * fmaf(step, i / 4 * 8.0f + 1.0f, distance));
      }
    }
    return;
  }

  find_positions(terms.runs, positions, first, barrier);
#pragma unroll
  for (int i = 0; i < kKeys / 2; i += 4) {
    const int2 pair = *reinterpret_cast<const int2*>(&positions[i / 4 * 8 + 2 * t]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float distance = static_cast<float>((j % 2 ? pair.y : pair.x) - own - j / 2 * 8);
      s[i + j] = fmaf(s[i + j], c, terms.slope * (terms.two_sided ? -fabsf(distance) : distance));
    }
  }
}

// ---- the instances ---------------------------------------------------------------------------

template <class T>
__device__ bool is_capped(const KernelParams& call) {
  return T::kScores == ScoreKind::softcap ||
         (T::kScores == ScoreKind::any && call.softcap.height != 0.0f);
}

/// The factor that makes a score, base 2, of a product or of its tanh.
template <class T>
__device__ float score_factor(const KernelParams& call) {
  return is_capped<T>(call) ? call.softcap.height : call.params.score.scale * kLog2E;
}

/// A row's maximum as the epilogue stores it. row: of the work tile.
template <class T>
__device__ float lifted(float max, const Shared<T>& shared, int stage, int row) {
  if constexpr (T::kScores == ScoreKind::any)
    max = fmaf(shared.alibi.terms[stage].lift,
               static_cast<float>(shared.alibi.terms[stage].index + row), max);
  return max;
}

/// The reverse, for an incoming maximum. The product is exact, and so is the small difference of
/// two large numbers: the only loss is from rounding the lifted maximum.
template <class T>
__device__ float lowered(float max, const Shared<T>& shared, int stage, int row) {
  if constexpr (T::kScores == ScoreKind::any)
    max = fmaf(-shared.alibi.terms[stage].lift,
               static_cast<float>(shared.alibi.terms[stage].index + row), max);
  return max;
}

}  // namespace longspan::kernels::sm90
