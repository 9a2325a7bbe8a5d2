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

}  // namespace longspan::kernels::cuda
