// The online softmax of a consumer thread of the Hopper kernel, from tile to tile. A thread has two
// rows, of each 2 columns in 8.
#pragma once

#include "kernels/cuda/hopper/attend_sm90_scores.cuh"

namespace longspan::kernels::sm90 {

/// The softmax of a thread's two rows, tile by tile. Exponentials count from an origin, which is
/// kLift below a maximum that the row has seen. It moves only when a score exceeds it by more than
/// kSlack, so that p stays below 2^kSlack and O is hardly ever rescaled.
template <class T>
struct OnlineSoftmax {
  float max[2] = {-INFINITY, -INFINITY};  // of the quad's columns, base 2
  float origin[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0, 0};  // of this thread's columns

  /// Adds a tile whose largest score, base 2, is `top` to row h. Returns the origin of its
  /// exponentials, and in `ratio` the factor by which earlier sums and O shrink.
  __device__ float take_max(int h, float top, float& ratio) {
    max[h] = fmaxf(max[h], top);
    const float moved = top > origin[h] + T::kSlack ? top - T::kLift : origin[h];
    const float from = moved == -INFINITY ? 0.0f : moved;  // nothing visible yet
    ratio = exp2_fast(origin[h] - from);
    origin[h] = moved;
    return from;
  }

  /// s of row h becomes p = exp2(s factor(s) - from), and its sum is added to the row's.
  template <int kCount, class Factor>
  __device__ void exponentiate(float (&s)[kCount], int h, const Factor& factor, float from,
                               float ratio) {
    float part = 0;
#pragma unroll
    for (int i = 2 * h; i < kCount; i += 4) {
      s[i] = exp2_fast(fmaf(s[i], factor(s[i]), -from));
      s[i + 1] = exp2_fast(fmaf(s[i + 1], factor(s[i + 1]), -from));
      part += s[i] + s[i + 1];
    }
    sum[h] = fmaf(sum[h], ratio, part);
  }

  /// Products s become p; `ratio` are the factors by which earlier sums and O shrink.
  template <int kCount>
  __device__ void update(float (&s)[kCount], float c, float (&ratio)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = fmaxf(s[2 * h], s[2 * h + 1]);
#pragma unroll
      for (int i = 4; i < kCount; i += 4) top = fmaxf(top, fmaxf(s[i + 2 * h], s[i + 2 * h + 1]));
      top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
      top = __fmul_rn(fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2)), c);
      const float from = take_max(h, top, ratio[h]);
      exponentiate(s, h, Constant{c}, from, ratio[h]);
    }
  }

  /// The same for products whose largest in each row is known.
  template <int kCount, class Factor>
  __device__ void update_below(float (&s)[kCount], const float (&top)[2], const Factor& factor,
                               float (&ratio)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float from = take_max(h, top[h] * factor(top[h]), ratio[h]);
      exponentiate(s, h, factor, from, ratio[h]);
    }
  }

  /// The same for scores in base 2; those of the second row are too high by `less`. below: as for
  /// find_tops.
  template <int kCount>
  __device__ void update_less(float (&s)[kCount], float less, bool below, float (&ratio)[2]) {
    float top[2];
    find_tops(s, below, top);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float high = h == 0 ? 0.0f : less;
      const float from = take_max(h, top[h] - high, ratio[h]);
      exponentiate(s, h, Constant{1.0f}, from + high, ratio[h]);
    }
  }

  /// The statistics of the whole row, from its origin.
  __device__ Stats stats(int h) const {
    float whole = sum[h] + __shfl_xor_sync(0xffffffff, sum[h], 1);
    whole += __shfl_xor_sync(0xffffffff, whole, 2);
    return {origin[h], whole};
  }
  /// The factor from the origin to the maximum, from which a state counts.
  __device__ float to_max(int h) const {
    return max[h] == -INFINITY ? 1.0f : exp2_fast(origin[h] - max[h]);
  }
};

__device__ inline std::uint32_t pack(float low, float high, __half) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const std::uint32_t&>(pair);
}
__device__ inline std::uint32_t pack(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const std::uint32_t&>(pair);
}

/// Rounds weights in pairs: a thread's scores are exactly the elements that it must hold of P as
/// the next product's operand.
template <class Element, int kCount>
__device__ void round_weights(std::uint32_t (&p)[kCount / 8][4], const float (&s)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 2) p[i / 8][i / 2 % 4] = pack(s[i], s[i + 1], Element{});
}

template <int kCount>
__device__ void rescale(float (&o)[kCount], const float (&ratio)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) o[i] *= ratio[i / 2 % 2];
}

}  // namespace longspan::kernels::sm90
