// The host's side of launches whose start overlaps the end of the kernel before (arch/overlap.cuh).
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/common/code.hpp"
#include "kernels/cuda/common/launch.hpp"
#include "src/base/check.hpp"

namespace longspan::kernels::cuda {

/// The architecture that the code of a kernel which runs here was compiled for.
inline int ptx_version_of(const void* kernel) {
  cudaFuncAttributes attributes{};
  LONGSPAN_CUDA(cudaFuncGetAttributes(&attributes, kernel));
  return attributes.ptxVersion;
}

/// Launches kKernel(task); it overlaps the kernel before it if `wanted` and if its code can.
template <auto* kKernel, class Task>
void launch_overlapping(const Task& task, dim3 grid, dim3 block, bool wanted, cudaStream_t stream) {
  static const bool overlaps =
      is_code_of_sm90(ptx_version_of(reinterpret_cast<const void*>(kKernel)));
  launch_kernel(kKernel, {grid, block, stream, 0, wanted && overlaps}, task);
}

}  // namespace longspan::kernels::cuda
