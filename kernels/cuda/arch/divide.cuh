// The reciprocal with which divisions start.
#pragma once

namespace longspan::kernels::cuda::arch {

/// 1 / x to about one unit in the last place, for x that is neither tiny nor huge.
__device__ inline float approximate_reciprocal(float x) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(x));
  return reciprocal;
}

}  // namespace longspan::kernels::cuda::arch
