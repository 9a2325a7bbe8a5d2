// The compilation target as constants, so that kernels select with `if constexpr` and every
// compiler parses both branches.
#pragma once

namespace longspan::kernels::cuda::arch {

/// __CUDA_ARCH__ of this pass (sm_90: 900); 0 in the host's pass, which runs no kernel code.
#if defined(__CUDA_ARCH__)
inline constexpr int kTarget = __CUDA_ARCH__;
#else
inline constexpr int kTarget = 0;
#endif

/// Whether this pass has Hopper's own instructions (sm90.cuh): only with the target sm_90a.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
inline constexpr bool kHasWgmma = true;
#else
inline constexpr bool kHasWgmma = false;
#endif

}  // namespace longspan::kernels::cuda::arch
