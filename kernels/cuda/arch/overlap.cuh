// The overlap of a kernel's start with the end of the one before it (programmatic dependent
// launch).
#pragma once

namespace longspan::kernels::cuda::arch {

/// Lets the kernel launched after this one, if it was launched to overlap, occupy multiprocessors
/// once every block of this one has called this. It waits there until this one has ended.
__device__ inline void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/// Waits until the kernels before this one have ended and their writes are visible.
__device__ inline void wait_for_kernels_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace longspan::kernels::cuda::arch
