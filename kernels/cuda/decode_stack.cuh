// The fixed order's stack of the decode kernel. States that wait on the lowest kLow levels stay in
// registers, each level in its own, and only the rest is in memory (FoldStack): a read from memory
// waits behind all the keys that are under way, and drains the ring. Of the folds of a full tree,
// one in 2^kLow reads memory. The lowest level folds first in both, so the order is the same.
#pragma once

#include "kernels/cuda/fold_stack.cuh"

namespace longspan::kernels::cuda {

template <class State, int kThreads, int kLow>
class DecodeStack {
  using Memory = FoldStack<State, kThreads, false>;

 public:
  static constexpr std::size_t kStateBytes = Memory::kStateBytes;

  __device__ DecodeStack(float* stack, int depth) : memory_(stack, depth) {}

  static constexpr int kAll = 32;  // a level above all

  /// `newest` becomes the state of its subtree of 2^level places and waits there; or, on level
  /// kAll, of everything since the last such call.
  __device__ __forceinline__ void fold(State& newest, int level) {
    fold_low(newest, level);
    if (level >= kLow) return memory_.fold(newest, level);
#pragma unroll
    for (int i = 0; i < kLow; ++i)
      if (i == level) low_[i] = newest;
    waiting_ |= 1u << level;
  }

 private:
  __device__ __forceinline__ void fold_low(State& newest, int level) {
#pragma unroll
    for (int i = 0; i < kLow; ++i) {
      if (i >= level || (waiting_ >> i & 1) == 0) continue;
      waiting_ &= ~(1u << i);
      newest.merge(
          [&](int q) {
            const auto& o = low_[i].o[q];
            return make_float4(o[0], o[1], o[2], o[3]);
          },
          [&](int r) { return low_[i].stats[r]; });
    }
  }

  Memory memory_;
  std::uint32_t waiting_ = 0;  // bit k: low_[k] waits
  State low_[kLow > 0 ? kLow : 1];
};

}  // namespace longspan::kernels::cuda
