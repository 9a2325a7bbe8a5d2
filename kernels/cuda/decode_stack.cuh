// The fixed order's stack of the decode kernel. The state that waits on the lowest level stays in
// shared memory, and only the rest is in memory (FoldStack), where a read waits behind all the keys
// that are under way. The lowest level folds first in both, so the order is the same.
#pragma once

#include "kernels/cuda/fold_stack.cuh"

namespace longspan::kernels::cuda {

template <class State, int kThreads>
class DecodeStack {
  using Memory = FoldStack<State, kThreads, false>;

 public:
  static constexpr std::size_t kStateBytes = Memory::kStateBytes;
  static constexpr int kLowBytes = 32 * 16 * State::kQuads;  // of a warp
  static constexpr int kAll = 32;                            // a level above all

  __device__ __forceinline__ DecodeStack(float* stack, int depth) : memory_(stack, depth) {}

  /// `newest` becomes the state of its subtree of 2^level places and waits there; or, on level
  /// kAll, of everything since the last such call. `shared`: kLowBytes of shared memory, the warp's
  /// own until then.
  __device__ __forceinline__ void fold(State& newest, int level, void* shared) {
    float4* low = static_cast<float4*>(shared) + threadIdx.x % 32;
    if (level == 0) {
#pragma unroll
      for (int q = 0; q < State::kQuads; ++q)
        low[32 * q] = make_float4(newest.o[q][0], newest.o[q][1], newest.o[q][2], newest.o[q][3]);
#pragma unroll
      for (int r = 0; r < State::kRows; ++r) low_stats_[r] = newest.stats[r];
      waits_ = true;
      return;
    }
    if (waits_) {
      waits_ = false;
      newest.merge([&](int q) { return low[32 * q]; }, [&](int r) { return low_stats_[r]; });
    }
    memory_.fold(newest, level);
  }

 private:
  Memory memory_;
  Stats low_stats_[State::kRows];
  bool waits_ = false;  // on level 0
};

}  // namespace longspan::kernels::cuda
