// cp.async of one word, in the simulator.
#pragma once

#include "kernels/cuda/arch/sm80.cuh"

namespace longspan::kernels::cuda::arch {

/// 4 bytes from global to shared memory, asynchronously.
inline void copy_word_async(const void* to, const void* from,
                            simulated::Site site = simulated::Site::current()) {
  copy_async<4>(shared_address(to, site), from, 4, site);
}

}  // namespace longspan::kernels::cuda::arch
