// cp.async of one word, for entries of block tables, which are in the same groups as larger copies.
#pragma once

#include <cstdint>

#include "kernels/cuda/arch/sm80.cuh"

namespace longspan::kernels::cuda::arch {

/// 4 bytes from global to shared memory, asynchronously.
__device__ inline void copy_word_async(const void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n" ::"r"(shared_address(to)), "l"(from)
               : "memory");
}

}  // namespace longspan::kernels::cuda::arch
