// Stores a row's state, which several lanes hold. If the row starts from the state in memory
// (AttendParams::resume), it first folds with that one.
#pragma once

#include "kernels/cuda/common/view.cuh"

namespace longspan::kernels::cuda {

/// kLanes neighbours in a warp hold a row, and call these functions together.
template <int kLanes>
class RowStore {
 public:
  /// Stores max and sum.
  __device__ RowStore(const AttendParams& p, const Target& to, const Stats& stats)
      : o_(to.o()), resumes_(p.resume), fold_{stats, 0.0f, Fold::second} {
    if (resumes_) {
      fold_ = fold(to.stats(), stats);
      constexpr unsigned kMask = kLanes == 32 ? ~0u : (1u << kLanes % 32) - 1;
      __syncwarp(kMask << threadIdx.x % 32 / kLanes * kLanes);  // all have read what one writes
    }
    if (threadIdx.x % kLanes == 0) to.stats() = fold_.stats;
  }

  /// Stores elements from d on.
  __device__ void operator()(int d, float2 own) const {
    float2& at = *reinterpret_cast<float2*>(o_ + d);
    if (resumes_) {
      const float2 before = at;
      own = {fold_(before.x, own.x), fold_(before.y, own.y)};
    }
    at = own;
  }
  __device__ void operator()(int d, float4 own) const {
    float4& at = *reinterpret_cast<float4*>(o_ + d);
    if (resumes_) {
      const float4 before = at;
      own = {fold_(before.x, own.x), fold_(before.y, own.y), fold_(before.z, own.z),
             fold_(before.w, own.w)};
    }
    at = own;
  }

 private:
  float* o_;
  bool resumes_;
  Fold fold_;
};

}  // namespace longspan::kernels::cuda
