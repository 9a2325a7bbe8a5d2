// A block's shared memory: the dynamic part, and variables of kernels.
#pragma once

#include <cstddef>

namespace longspan::kernels::cuda::arch {

/// The block's dynamic shared memory with the given alignment in bytes, for pointers to std::byte.
/// Arrays of one name have one alignment in a program, hence the names.
extern __shared__ __align__(16) std::byte shared_by_16[];
extern __shared__ __align__(128) std::byte shared_by_128[];
extern __shared__ __align__(1024) std::byte shared_by_1024[];

/// The same by number. Kernels name the array itself: with a call of this, nvcc 13.0 made different
/// machine code, though the call itself vanishes.
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

/// A variable of the block, not initialised. The same T and kId give the same variable: different
/// kernels may share it, since each block has its own memory, but two variables of one kernel must
/// differ in T or kId.
template <class T, int kId = 0>
__device__ inline T& shared_variable() {
  __shared__ T variable;
  return variable;
}

}  // namespace longspan::kernels::cuda::arch
