// The end of a merged row on CUDA, for every kernel that finishes one: sink, division, scale, then
// the one rounding.
#pragma once

#include "kernels/cuda/arch/divide.cuh"
#include "kernels/cuda/combine/fold_tree.cuh"
#include "kernels/cuda/common/access.hpp"
#include "kernels/cuda/common/convert.cuh"
#include "kernels/params.hpp"

namespace longspan::kernels::cuda {

/// o / sum, or 0 if the sum is 0, like finish in state.hpp. For ordinary numbers the steps, and so
/// the bits, are those of the compiler's division: an approximate reciprocal, refined once, and a
/// quotient corrected once. The compiler tests before each division whether the numbers are
/// ordinary; here all columns share the reciprocal and the test.
template <int kColumns>
__device__ void divide(float (&o)[kColumns], float sum) {
  constexpr float kLeast = 0x1p-60f, kMost = 0x1p60f;
  bool ordinary = sum >= kLeast && sum <= kMost;
#pragma unroll
  for (float one : o) {
    const float size = fabsf(one);
    ordinary &= size == 0.0f || (size >= kLeast && size <= kMost);
  }
  if (ordinary) {
    const float approximate = arch::approximate_reciprocal(sum);
    const float reciprocal = fmaf(approximate, fmaf(approximate, -sum, 1.0f), approximate);
#pragma unroll
    for (float& one : o) {
      const float quotient = one * reciprocal;
      const float corrected = fmaf(reciprocal, fmaf(quotient, -sum, one), quotient);
      one = one == 0.0f ? one : corrected;  // keeps the sign of a zero
    }
  } else {
#pragma unroll
    for (float& one : o) one = sum == 0.0f ? 0.0f : one / sum;
  }
}

/// Inputs of a row's end other than its state. They are loaded when this is constructed, which is
/// before a wait for a state, if there is one.
struct RowEpilogue {
  bool has_sink;
  Stats sink;
  LoadedScale scale;

  __device__ RowEpilogue(const MergeParams& m, int head) : has_sink(m.sinks), scale(m.out_scale) {
    if (has_sink) sink = sink_stats(m.sinks[head]);
  }

  /// Turns the state's columns into the result's, in place, and its statistics into the final ones.
  template <int kColumns>
  __device__ void finish(StateColumns<kColumns>& state) const {
    if (has_sink) {
      const Fold fold = longspan::fold(state.stats, sink);
      state.stats = fold.stats;
#pragma unroll
      for (float& o : state.o) o = fold(o, 0.0f);
    }
    divide(state.o, longspan::finish(state.stats).sum);
    scale.apply(state.o);
  }
};

/// The location in the result of a row's columns from `column` on.
struct ResultPlace {
  std::int64_t at;  // the element of out
  float* lse;       // null if this thread writes none

  ResultPlace() = default;
  __device__ ResultPlace(const MergeParams& m, std::int64_t token, int head, int column)
      : at(m.out.offset(token, head) + column), lse(nullptr) {
    if (m.lse.data != nullptr && column == 0) lse = m.lse.at(token, head);
  }
};

/// Whether a row of `dim` elements can be stored kColumns at a time.
template <int kColumns>
bool is_wide_result(const MergeParams& m, int dim) {
  return dim % kColumns == 0 && is_aligned<kColumns>(m.out, m.dtype);
}

/// Rounds and stores the first `count` of a finished row's columns, several at once if `wide`. The
/// logarithm is computed after the columns, and only if it is wanted.
template <int kColumns>
__device__ void store_result(const MergeParams& m, const ResultPlace& place,
                             const StateColumns<kColumns>& row, int count, bool wide) {
  if (wide && count >= kColumns) {
    store_elements(m.out.data, m.dtype, place.at, row.o);
  } else {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const float one[1] = {row.o[i]};
      if (i < count) store_elements(m.out.data, m.dtype, place.at + i, one);
    }
  }
  if (place.lse != nullptr) *place.lse = longspan::finish(row.stats).lse;
}

/// Stores the first `count` of four elements that are already rounded, in their memory order in
/// `words`.
__device__ inline void copy_elements(const MergeParams& m, const ResultPlace& place, uint4 words,
                                     int count, bool wide) {
  const int size = static_cast<int>(size_of(m.dtype));
  std::byte* to = static_cast<std::byte*>(m.out.data) + place.at * size;
  if (wide && count >= 4) {
    if (size == 4)
      *reinterpret_cast<uint4*>(to) = words;
    else if (size == 2)
      *reinterpret_cast<uint2*>(to) = make_uint2(words.x, words.y);
    else
      *reinterpret_cast<std::uint32_t*>(to) = words.x;
  } else {
    const std::uint32_t four[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i >= count) break;
      if (size == 4)
        reinterpret_cast<std::uint32_t*>(to)[i] = four[i];
      else if (size == 2)
        reinterpret_cast<std::uint16_t*>(to)[i] =
            static_cast<std::uint16_t>(four[i / 2] >> (16 * (i % 2)));
      else
        reinterpret_cast<std::uint8_t*>(to)[i] = static_cast<std::uint8_t>(words.x >> (8 * i));
    }
  }
}

}  // namespace longspan::kernels::cuda
