// The fixed order's stack of the decode kernels. States that wait on the lowest kLow levels stay in
// registers, each level in its own; the next ones in shared memory, as many as the launch has room
// for; and only the rest is in memory: a read from memory waits behind all the keys that are under
// way, and drains the ring. Of the folds of a full tree, one in 2^(levels before it) reads memory.
// The lowest level folds first in all of them, so the order is the same. Rows 2t and 2t + 1 of each
// row tile are those of all lanes of t: what is not in registers holds their scalars once a warp.
#pragma once

#include "kernels/cuda/common/fold_stack.cuh"

namespace longspan::kernels::cuda {

template <class State, int kThreads, int kLow>
class DecodeStack {
  static constexpr int kLanesOfRow = 8;
  static constexpr int kPairs = State::kRows / 2;
  static_assert(State::kRows % 2 == 0);

 public:
  /// Bytes of one state of one thread block, in shared memory as in memory.
  static constexpr std::size_t kStateBytes =
      std::size_t{16} * (State::kQuads * kThreads + kPairs * kThreads / kLanesOfRow);

  /// near: [near_levels] states of the block in shared memory; stack: [gridDim.x, depth] of them in
  /// memory, `depth` being the most that wait at a time.
  __device__ DecodeStack(void* near, int near_levels, float* stack, int depth)
      : near_(static_cast<float4*>(near)),
        far_(reinterpret_cast<float4*>(stack) +
             static_cast<std::int64_t>(blockIdx.x) * depth * kLevel),
        near_levels_(near_levels) {}

  static constexpr int kAll = 32;  // a level above all

  /// `newest` becomes the state of its subtree of 2^level places and waits there; or, on level
  /// kAll, of everything since the last such call.
  __device__ __forceinline__ void fold(State& newest, int level) {
    fold_low(newest, level);
    if (level > kLow) fold_rest(newest, level);
    if (level == kAll) return;
    if (level >= kLow) store(at(level), newest);
    waiting_ |= 1u << level;
#pragma unroll
    for (int i = 0; i < kLow; ++i)
      if (i == level) low_[i] = newest;
  }

 private:
  static constexpr int kLevel = static_cast<int>(kStateBytes / 16);  // float4 of a level

  /// Of a level, this thread's elements; of its rows, the scalars.
  __device__ static float4& quad(float4* level, int q) { return level[q * kThreads + threadIdx.x]; }
  __device__ static float4& pair(float4* level, int i) {
    const int lanes = static_cast<int>(threadIdx.x) / 32 * 4 + static_cast<int>(threadIdx.x) % 4;
    return level[State::kQuads * kThreads + i * (kThreads / kLanesOfRow) + lanes];
  }
  __device__ __forceinline__ static void store(float4* level, const State& state) {
#pragma unroll
    for (int q = 0; q < State::kQuads; ++q) quad(level, q) = state.quad(q);
    // The place was another state's, whose scalars all lanes have read and four now overwrite: in
    // memory that of the state that this call folded last, as it has as many above it; in shared
    // memory one that an earlier call folded.
    __syncwarp();
    if (threadIdx.x % 32 >= 4) return;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const Stats &one = state.stats[2 * i], &other = state.stats[2 * i + 1];
      pair(level, i) = make_float4(one.max, one.sum, other.max, other.sum);
    }
  }

  /// Levels of sparse trees are more than `depth`, states that wait are not: in memory a state's
  /// place is the number of those above it.
  __device__ float4* at(int level) const {
    const int i = level - kLow;
    return i < near_levels_ ? near_ + i * kLevel
                            : far_ + std::int64_t{__popc(waiting_ >> level >> 1)} * kLevel;
  }

  __device__ __forceinline__ void fold_low(State& newest, int level) {
#pragma unroll
    for (int i = 0; i < kLow; ++i) {
      if (i >= level || (waiting_ >> i & 1) == 0) continue;
      waiting_ &= ~(1u << i);
      newest.merge([&](int q) { return low_[i].quad(q); }, [&](int r) { return low_[i].stats[r]; });
    }
  }

  __device__ __forceinline__ void fold_rest(State& newest, int level) {
#pragma unroll 1
    while (waiting_ != 0) {
      const int lowest = __ffs(static_cast<int>(waiting_)) - 1;
      if (lowest >= level) return;
      waiting_ &= waiting_ - 1;
      float4* level_of = at(lowest);
      __syncwarp();  // the scalars were written by other lanes
      newest.merge([&](int q) { return quad(level_of, q); },
                   [&](int row) {
                     const float4 two = pair(level_of, row / 2);
                     return row % 2 == 0 ? Stats{two.x, two.y} : Stats{two.z, two.w};
                   });
    }
  }

  float4* near_;
  float4* far_;
  int near_levels_;
  std::uint32_t waiting_ = 0;  // bit k: a state waits on level k
  State low_[kLow > 0 ? kLow : 1];
};

}  // namespace longspan::kernels::cuda
