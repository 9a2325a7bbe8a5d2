// The reciprocal with which divisions start, in the simulator.
#pragma once

#include <cmath>
#include <limits>

namespace longspan::kernels::cuda::arch {

/// 1 / x. Subnormals count as 0, before and after.
inline float approximate_reciprocal(float x) {
  constexpr float kLeast = std::numeric_limits<float>::min();
  const float reciprocal = 1.0f / (std::fabs(x) < kLeast ? std::copysign(0.0f, x) : x);
  return std::fabs(reciprocal) < kLeast ? std::copysign(0.0f, x) : reciprocal;
}

}  // namespace longspan::kernels::cuda::arch
