// The only function that launches kernels, with typed arguments. A launch reports its own status.
// It never reads the runtime's last error, which may be of an earlier call whose failure was
// handled. An environment that runs these kernels elsewhere, such as the simulator on CPUs,
// replaces this header and overlap.hpp.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <type_traits>

#include "src/base/check.hpp"

namespace longspan::kernels::cuda {

/// Where and how a kernel runs.
struct LaunchConfig {
  dim3 grid;
  dim3 block;
  cudaStream_t stream = nullptr;
  std::size_t shared_bytes = 0;  // dynamic, of a block
  bool overlaps = false;         // its start may overlap the kernel before it (overlap.hpp)
};

/// Queues kernel(arguments...). Throws BackendError if the runtime refuses; then nothing is queued.
template <class... Parameters>
void launch_kernel(void (*kernel)(Parameters...), const LaunchConfig& how,
                   const std::type_identity_t<Parameters>&... arguments) {
  void* places[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = how.grid;
  config.blockDim = how.block;
  config.dynamicSmemBytes = how.shared_bytes;
  config.stream = how.stream;
  config.attrs = &overlap;
  config.numAttrs = how.overlaps ? 1 : 0;
  LONGSPAN_CUDA(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), places));
}

}  // namespace longspan::kernels::cuda
