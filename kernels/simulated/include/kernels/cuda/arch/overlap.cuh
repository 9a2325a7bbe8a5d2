// The overlap of a kernel's start with the end of the one before it, in the simulator. GPUs before
// sm_90 have none.
#pragma once

#include "kernels/cuda/arch/target.cuh"
#include "kernels/simulated/thread.hpp"

namespace longspan::kernels::cuda::arch {

inline void let_next_kernel_start() {
  if constexpr (kTarget >= 900) simulated::let_next_kernel_start();
}

inline void wait_for_kernels_before(simulated::Site site = simulated::Site::current()) {
  if constexpr (kTarget >= 900) simulated::wait_for_kernels_before(site);
}

}  // namespace longspan::kernels::cuda::arch
