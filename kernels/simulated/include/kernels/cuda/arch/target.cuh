// The target of a build for the simulator: the GPU that LONGSPAN_SIMULATED_ARCH names.
#pragma once

namespace longspan::kernels::cuda::arch {

/// Like __CUDA_ARCH__ of code for that GPU.
inline constexpr int kTarget = LONGSPAN_SIMULATED_ARCH * 10;

/// Whether it has Hopper's own instructions (sm90.cuh).
inline constexpr bool kHasWgmma = LONGSPAN_SIMULATED_ARCH == 90;

}  // namespace longspan::kernels::cuda::arch
