// A block's shared memory: what the launch asked for, and variables of kernels.
#pragma once

#include <cstddef>

namespace longspan::kernels::cuda::arch {

/// The block's dynamic shared memory, at a multiple of so many bytes: for pointers to std::byte.
/// Arrays of one name have one alignment in a program, hence the names.
extern __shared__ __align__(16) std::byte shared_by_16[];
extern __shared__ __align__(128) std::byte shared_by_128[];
extern __shared__ __align__(1024) std::byte shared_by_1024[];

/// The same by number. Kernels name the array itself: of one that asked here nvcc 13.0 made other
/// machine code, though nothing is left of the call.
template <int kAlign>
__device__ inline std::byte* dynamic_shared() {
  static_assert(kAlign == 16 || kAlign == 128 || kAlign == 1024);
  if constexpr (kAlign == 16)
    return shared_by_16;
  else if constexpr (kAlign == 128)
    return shared_by_128;
  else
    return shared_by_1024;
}

/// A variable of the block, of any content at first. Whoever asks for the same T and kId gets the
/// same one: kernels may share it, as blocks have memory of their own, but two variables of one
/// kernel differ in one or the other.
template <class T, int kId = 0>
__device__ inline T& shared_variable() {
  __shared__ T variable;
  return variable;
}

}  // namespace longspan::kernels::cuda::arch
