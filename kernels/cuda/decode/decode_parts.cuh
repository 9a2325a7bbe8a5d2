// The scores of a segment in the decode kernel, and what the warps of a block say to each other of
// it: maxima, sums, weights.
#pragma once

#include <cstdint>

#include "kernels/cuda/arch/tma.cuh"

namespace longspan::kernels::cuda {

/// Of a segment, the tile that is a warp's `own`th.
template <class Traits>
__device__ inline int own_tile(int own) {
  return own * Traits::kWarps + static_cast<int>(threadIdx.x) / 32;
}

/// Key of the segment that elements 2 half and 2 half + 1 of a lane's scores are of.
template <class Traits>
__device__ inline int key_of_segment(int own, int half) {
  return own_tile<Traits>(own) * Traits::kTile + half * 8 + static_cast<int>(threadIdx.x) % 32 / 4;
}

/// A warp's part: s[own tile][row tile][2 half + j] is row 2t + j.
template <class Traits>
struct Scores {
  float s[Traits::kOwnTiles][Traits::kRowTiles][4];

  /// The next tile's. Registers cannot be indexed, so those before it move along.
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

/// In shared memory. Writers and readers are a barrier apart, and so are a segment's readers and
/// the next one's writers.
template <class Traits>
struct SegmentParts {
  using OfWarps = float2[Traits::kWarps][Traits::kRowTiles][4];  // rows 2t, 2t + 1

  uint2 weights[Traits::kTiles][Traits::kRowTiles][32];  // of a tile: the products' second factor
  OfWarps tops, sums;

  /// The barrier.
  __device__ static void meet() { arch::named_sync(1, Traits::kThreads); }

  /// A warp's numbers of rows 2t and 2t + 1 of each row tile, which all of its lanes of t have.
  __device__ static void put(OfWarps& parts, const float (&own)[Traits::kRowTiles][2]) {
    const int lane = threadIdx.x % 32;
    if (lane >= 4) return;
#pragma unroll
    for (int n = 0; n < Traits::kRowTiles; ++n)
      parts[threadIdx.x / 32][n][lane] = make_float2(own[n][0], own[n][1]);
  }
  /// All warps' numbers of these rows, made one.
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
