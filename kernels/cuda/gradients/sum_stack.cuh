// The sums of virtual ranks, folded as the fixed order's tree (fixed_order.cuh). Every thread keeps
// its own part, so the stack needs no barrier.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/fixed_order.cuh"
#include "kernels/cuda/gradients/plan.hpp"

namespace longspan::kernels::cuda {

/// kFloats sums of each of kThreads threads.
template <int kFloats, int kThreads>
class SumStack {
 public:
  __device__ explicit SumStack(float* stack)
      : memory_(stack + static_cast<std::int64_t>(blockIdx.x) * kFoldLevels * kFloats * kThreads +
                threadIdx.x) {}

  /// Ends the sum of virtual rank `leaf`; that of `next` follows, from zero.
  __device__ void finish(float (&newest)[kFloats], int leaf, int next) {
    const int level = finished_level(leaf, next);
    fold_below(newest, level);
    float* const to = at(__popc(waiting_));
#pragma unroll
    for (int i = 0; i < kFloats; ++i) {
      to[i * kThreads] = newest[i];
      newest[i] = 0.0f;
    }
    waiting_ |= 1u << level;
  }

  /// Makes `newest` the sum of all.
  __device__ void fold_all(float (&newest)[kFloats]) { fold_below(newest, 32); }

 private:
  __device__ void fold_below(float (&newest)[kFloats], int level) {
    while (waiting_ != 0) {
      const int lowest = __ffs(static_cast<int>(waiting_)) - 1;  // the newest waiting sum
      if (lowest >= level) return;
      waiting_ &= waiting_ - 1;
      const float* const from = at(__popc(waiting_));
#pragma unroll
      for (int i = 0; i < kFloats; ++i) newest[i] = __fadd_rn(from[i * kThreads], newest[i]);
    }
  }
  __device__ float* at(int depth) const {
    return memory_ + static_cast<std::int64_t>(depth) * kFloats * kThreads;
  }

  float* memory_;
  std::uint32_t waiting_ = 0;  // bit k: a sum waits on level k
};

}  // namespace longspan::kernels::cuda
