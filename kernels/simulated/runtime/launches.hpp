// Queues kernels into streams, and returns the properties of a kernel.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/simulated/machine.hpp"

namespace longspan::simulated {

/// Returns what cudaLaunchKernelExC would. `address`: of the function, by which its limit of shared
/// memory was set. `overlaps`: it may start while the kernel before it in the stream ends.
cudaError_t queue_kernel(Kernel kernel, const void* address, cudaStream_t stream, bool overlaps);

/// A name for reports: of the function, if the process knows it, and of the launch site. It is
/// never freed.
const char* name_of_kernel(const void* address, const char* file, unsigned line);

}  // namespace longspan::simulated
