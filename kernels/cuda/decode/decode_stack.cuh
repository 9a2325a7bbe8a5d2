// The fixed order's stack in the decode kernel. States that wait on the lowest kLow levels stay in
// registers, each level in its own. Those of the next levels are in shared memory, as many as the
// launch has room for. Only the rest is in global memory: a read from there waits behind all keys
// in flight, and drains the ring. Of the folds of a full tree, one in 2^(levels before it) reads
// global memory. The lowest level always folds first, so the order is the same everywhere. All
// lanes of t have rows 2t and 2t + 1 of each row tile; outside of registers their scalars are
// stored once a warp.
#pragma once

#include "kernels/cuda/arch/peer.cuh"
#include "kernels/cuda/common/fold_stack.cuh"

namespace longspan::kernels::cuda {

/// kWhole: a state is requested whole before its first number is used, and rows fold side by side.
/// The compiler would rather save registers, so that one access to memory follows another.
template <class State, int kThreads, int kLow, bool kWhole = false>
class DecodeStack {
  static constexpr int kLanesOfRow = 8;
  static constexpr int kPairs = State::kRows / 2;
  static_assert(State::kRows % 2 == 0);

 public:
  /// Bytes of one state of one thread block, the same in shared and in global memory.
  static constexpr std::size_t kStateBytes =
      std::size_t{16} * (State::kQuads * kThreads + kPairs * kThreads / kLanesOfRow);

  /// near: [near_levels] states of the block in shared memory; stack: [gridDim.x, depth] of them in
  /// global memory, `depth` being the most that wait at a time.
  __device__ DecodeStack(void* near, int near_levels, float* stack, int depth)
      : near_(static_cast<float4*>(near)),
        far_(reinterpret_cast<float4*>(stack) +
             static_cast<std::int64_t>(blockIdx.x) * depth * kLevel),
        near_levels_(near_levels) {}

  static constexpr int kAll = 32;  // the level above all others

  /// Makes `newest` the state of its subtree of 2^level indices, which waits on that level. On
  /// level kAll it becomes the state of everything since the last such call, and nothing waits any
  /// more.
  __device__ __forceinline__ void fold(State& newest, int level) {
    fold_low(newest, level);
    if (level > kLow) fold_waiting(newest, level);
    if (level == kAll) return;
    if (level >= kLow) store(at(level), newest);
    waiting_ |= 1u << level;
#pragma unroll
    for (int i = 0; i < kLow; ++i)
      if (i == level) low_[i] = newest;
  }

 private:
  static constexpr int kLevel = static_cast<int>(kStateBytes / 16);  // float4 of a level

  /// This thread's elements on a level, and the scalars of its rows.
  __device__ static float4& quad(float4* level, int q) { return level[q * kThreads + threadIdx.x]; }
  __device__ static float4& pair(float4* level, int i) {
    const int lanes = static_cast<int>(threadIdx.x) / 32 * 4 + static_cast<int>(threadIdx.x) % 4;
    return level[State::kQuads * kThreads + i * (kThreads / kLanesOfRow) + lanes];
  }
  __device__ __forceinline__ static void store(float4* level, const State& state) {
#pragma unroll
    for (int q = 0; q < State::kQuads; ++q) quad(level, q) = state.quad(q);
    // The slot held another state, whose scalars all lanes have read and four lanes now overwrite.
    // In global memory it is the state that this call folded last, since it has as many above it;
    // in shared memory it is one that an earlier call folded.
    __syncwarp();
    if (threadIdx.x % 32 >= 4) return;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const Stats &one = state.stats[2 * i], &other = state.stats[2 * i + 1];
      pair(level, i) = make_float4(one.max, one.sum, other.max, other.sum);
    }
  }

  __device__ static Stats stats_of(const float4& two, int row) {
    return row % 2 == 0 ? Stats{two.x, two.y} : Stats{two.z, two.w};
  }
  /// Loads from global memory, in the order of the calls.
  __device__ __forceinline__ static float4 load_far(const float4& from) {
    const uint4 four = arch::load_volatile(&from);
    return make_float4(__uint_as_float(four.x), __uint_as_float(four.y), __uint_as_float(four.z),
                       __uint_as_float(four.w));
  }

  /// The slot of a level. A sparse tree has more levels than `depth`, but not more waiting states:
  /// in global memory a state's slot is the number of states that wait above it.
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
      const auto quad_of = [&](int q) { return low_[i].quad(q); };
      const auto stats_of_row = [&](int r) { return low_[i].stats[r]; };
      if constexpr (kWhole)
        newest.merge_by_selection(quad_of, stats_of_row);
      else
        newest.merge(quad_of, stats_of_row);
    }
  }

  __device__ __forceinline__ void fold_waiting(State& newest, int level) {
#pragma unroll 1
    while (waiting_ != 0) {
      const int lowest = __ffs(static_cast<int>(waiting_)) - 1;
      if (lowest >= level) return;
      waiting_ &= waiting_ - 1;
      float4* level_of = at(lowest);
      __syncwarp();  // the scalars were written by other lanes
      if constexpr (kWhole) {
        float4 pairs[kPairs], quads[State::kQuads];
        const auto request = [&](const auto& load) {
#pragma unroll
          for (int i = 0; i < kPairs; ++i) pairs[i] = load(pair(level_of, i));
#pragma unroll
          for (int q = 0; q < State::kQuads; ++q) quads[q] = load(quad(level_of, q));
        };
        if (lowest - kLow < near_levels_)
          request([](const float4& from) { return from; });
        else
          request([](const float4& from) { return load_far(from); });
        newest.merge_by_selection([&](int q) { return quads[q]; },
                                  [&](int row) { return stats_of(pairs[row / 2], row); });
      } else {
        newest.merge([&](int q) { return quad(level_of, q); },
                     [&](int row) { return stats_of(pair(level_of, row / 2), row); });
      }
    }
  }

  float4* near_;
  float4* far_;
  int near_levels_;
  std::uint32_t waiting_ = 0;  // bit k: a state waits on level k
  State low_[kLow > 0 ? kLow : 1];
};

}  // namespace longspan::kernels::cuda
