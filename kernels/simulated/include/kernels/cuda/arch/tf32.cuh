// Products of tf32 in the simulator: the rounding and mma.sync m16n8k8.
#pragma once

#include <cstdint>

#include "kernels/simulated/numbers.hpp"
#include "kernels/simulated/tensor_core.hpp"

namespace longspan::kernels::cuda::arch {

/// x rounded to tf32's 10 bits of mantissa, ties away from zero.
inline std::uint32_t to_tf32(float x) { return simulated::tf32_bits(x); }

/// c += a b for factors from to_tf32, fp32 accumulation.
inline void mma_tf32(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1,
                     simulated::Site site = simulated::Site::current()) {
  simulated::multiply(simulated::Number::tf32, c, a, b0, b1, site);
}

}  // namespace longspan::kernels::cuda::arch
