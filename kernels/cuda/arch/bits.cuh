// Bits of integers, on the device as on the host.
#pragma once

#include <bit>
#include <cstdint>

#include "longspan/types.hpp"

namespace longspan::kernels::cuda::arch {

/// The index of the highest set bit of x, which is not 0. nvcc accepts std::bit_width in device
/// code, but with CUDA 13.0 its result was 0.
LONGSPAN_HD inline int highest_bit(std::uint64_t x) {
#if defined(__CUDA_ARCH__)
  return 63 - __clzll(static_cast<long long>(x));
#else
  return std::bit_width(x) - 1;
#endif
}

}  // namespace longspan::kernels::cuda::arch
