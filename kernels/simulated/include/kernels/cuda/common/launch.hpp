// Replaces kernels/cuda/common/launch.hpp if kernels run on the simulated GPUs: the same interface,
// whose kernels are called by the threads of the machine.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <source_location>
#include <tuple>
#include <type_traits>
#include <utility>

#include "kernels/simulated/runtime/launches.hpp"
#include "src/base/check.hpp"

namespace longspan::kernels::cuda {

/// Where and how a kernel runs.
struct LaunchConfig {
  dim3 grid;
  dim3 block;
  cudaStream_t stream = nullptr;
  std::size_t shared_bytes = 0;  // dynamic, of a block
  bool overlaps = false;         // its start may overlap the kernel before it (overlap.hpp)
  std::source_location site = std::source_location::current();  // for reports
};

/// Queues kernel(arguments...). Throws BackendError if the runtime refuses; then nothing is queued.
template <class... Parameters>
void launch_kernel(void (*kernel)(Parameters...), const LaunchConfig& how,
                   const std::type_identity_t<Parameters>&... arguments) {
  const auto* const address = reinterpret_cast<const void*>(kernel);
  simulated::Kernel queued;
  queued.body = [kernel, values = std::tuple<std::remove_cv_t<Parameters>...>(arguments...)] {
    std::apply(kernel, values);
  };
  queued.grid = how.grid;
  queued.block = how.block;
  queued.shared_bytes = how.shared_bytes;
  queued.name = simulated::name_of_kernel(address, how.site.file_name(), how.site.line());
  LONGSPAN_CUDA_STATUS(
      simulated::queue_kernel(std::move(queued), address, how.stream, how.overlaps),
      "cudaLaunchKernelExC");
}

}  // namespace longspan::kernels::cuda
