// The scores of a segment in the decode kernel, and the exchange between the consumer warps of a
// block: maxima, sums and weights.
#pragma once

#include <cstdint>

#include "kernels/cuda/arch/tma.cuh"

namespace longspan::kernels::cuda {

/// The tile of a segment that is number `own` of this warp's.
template <class Traits>
__device__ inline int own_tile(int own) {
  return own * Traits::kWarps + static_cast<int>(threadIdx.x) / 32;
}

/// The key, in its segment, of elements 2 half and 2 half + 1 of a lane's scores.
template <class Traits>
__device__ inline int key_of_segment(int own, int half) {
  return own_tile<Traits>(own) * Traits::kTile + half * 8 + static_cast<int>(threadIdx.x) % 32 / 4;
}

/// A warp's part of the scores: s[own tile][row tile][2 half + j] belongs to row 2t + j.
template <class Traits>
struct Scores {
  float s[Traits::kOwnTiles][Traits::kRowTiles][4];

  /// Appends the scores of the next tile. Registers cannot be indexed, so the older ones are
  /// shifted.
  __device__ void push(const float (&newest)[Traits::kRowTiles][4]) {
#pragma unroll
    for (int own = 0; own < Traits::kOwnTiles; ++own)
#pragma unroll
      for (int n = 0; n < Traits::kRowTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          s[own][n][i] = own + 1 < Traits::kOwnTiles ? s[own + 1][n][i] : newest[n][i];
  }
};

/// The exchange between consumer warps, in shared memory. A barrier separates writers from readers,
/// and the readers of a segment from the writers of the next one.
template <class Traits>
struct SegmentParts {
  using OfWarps = float2[Traits::kWarps][Traits::kRowTiles][4];  // rows 2t, 2t + 1

  uint2 weights[Traits::kTiles][Traits::kRowTiles]
               [32];  // P^T of a tile, the products' second factor
  OfWarps tops, sums;

  /// Synchronises all consumers.
  __device__ static void meet() { arch::named_sync(1, Traits::kThreads); }

  /// Stores a warp's numbers of rows 2t and 2t + 1 of each row tile; all of its lanes of t have
  /// them.
  __device__ static void put(OfWarps& parts, const float (&own)[Traits::kRowTiles][2]) {
    const int lane = threadIdx.x % 32;
    if (lane >= 4) return;
#pragma unroll
    for (int n = 0; n < Traits::kRowTiles; ++n)
      parts[threadIdx.x / 32][n][lane] = make_float2(own[n][0], own[n][1]);
  }
  /// Reduces all warps' numbers of these rows.
  template <class Join>
  __device__ static void get(const OfWarps& parts, float (&whole)[Traits::kRowTiles][2],
                             const Join& join) {
#pragma unroll
    for (int n = 0; n < Traits::kRowTiles; ++n) {
      float2 of[Traits::kWarps];
#pragma unroll
      for (int warp = 0; warp < Traits::kWarps; ++warp) of[warp] = parts[warp][n][threadIdx.x % 4];
      const auto two = [&](const float2& one, const float2& other) {
        return make_float2(join(one.x, other.x), join(one.y, other.y));
      };
      static_assert(Traits::kWarps == 4);
      const float2 one = two(two(of[0], of[1]), two(of[2], of[3]));
      whole[n][0] = one.x, whole[n][1] = one.y;
    }
  }
};

}  // namespace longspan::kernels::cuda
