// Launches whose start overlaps the end of the kernel before (arch/overlap.cuh): on the host's
// side.
#pragma once

#include <cuda_runtime_api.h>

#include "src/check.hpp"

namespace longspan::kernels::cuda {

/// Whether the code of a kernel that runs here is of the kind that waits for the kernels before it.
inline bool can_overlap(const void* kernel) {
  cudaFuncAttributes attributes{};
  LONGSPAN_CUDA(cudaFuncGetAttributes(&attributes, kernel));
  return attributes.ptxVersion >= 90;
}

inline cudaLaunchAttribute overlap_attribute() {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  return overlap;
}

/// Launches kKernel(task); its start overlaps the kernel before where `wanted` and its code can.
template <auto* kKernel, class Task>
void launch_overlapping(const Task& task, dim3 grid, dim3 block, bool wanted, cudaStream_t stream) {
  static const bool overlaps = can_overlap(reinterpret_cast<const void*>(kKernel));
  cudaLaunchAttribute overlap = overlap_attribute();
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = wanted && overlaps ? 1 : 0;
  LONGSPAN_CUDA(cudaLaunchKernelEx(&config, kKernel, task));
}

}  // namespace longspan::kernels::cuda
