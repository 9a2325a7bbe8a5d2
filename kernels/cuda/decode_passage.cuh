// The scores of a segment in the decode kernel, and how they and the weights get from one loop over
// its stages to the next. The loops are not unrolled, as code that has to be fetched costs more.
#pragma once

#include <cstdint>

namespace longspan::kernels::cuda {

/// Of a segment: s[tile][row tile][2 half + j] is key 16 tile + 8 half + lane / 4, row 2t + j.
template <class Traits>
struct Scores {
  float s[Traits::kTiles][Traits::kRowTiles][4];
};

/// A lane's own way of passing numbers from one loop over tiles to the next: shared memory, as
/// registers cannot be indexed. Scores, then weights in their place.
template <class Traits>
class Passage {
 public:
  __device__ explicit Passage(typename Traits::Shared& shared)
      : slot_(shared.passage[threadIdx.x / 32 % Traits::kTeam][0] + threadIdx.x % 32) {}

  __device__ void put_scores(int tile, const float (&s)[Traits::kRowTiles][4]) {
#pragma unroll
    for (int n = 0; n < Traits::kRowTiles; ++n)
      at(tile, n) = make_float4(s[n][0], s[n][1], s[n][2], s[n][3]);
  }
  __device__ void get_scores(Scores<Traits>& scores) {
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile)
#pragma unroll
      for (int n = 0; n < Traits::kRowTiles; ++n) {
        const float4 four = at(tile, n);
        float(&s)[4] = scores.s[tile][n];
        s[0] = four.x, s[1] = four.y, s[2] = four.z, s[3] = four.w;
      }
  }
  __device__ void put_weights(int tile, int n, std::uint32_t low, std::uint32_t high) {
    *reinterpret_cast<uint2*>(&at(tile, n)) = make_uint2(low, high);
  }
  __device__ void get_weights(int tile, std::uint32_t (&weights)[Traits::kRowTiles][2]) {
#pragma unroll
    for (int n = 0; n < Traits::kRowTiles; ++n) {
      const uint2 two = *reinterpret_cast<const uint2*>(&at(tile, n));
      weights[n][0] = two.x, weights[n][1] = two.y;
    }
  }

 private:
  __device__ float4& at(int tile, int n) { return slot_[(tile * Traits::kRowTiles + n) * 32]; }
  float4* slot_;
};

}  // namespace longspan::kernels::cuda
