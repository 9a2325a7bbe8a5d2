// The backend of tests of a kernel that every device must pass (tests/support/on_device.hpp): that
// of the GPU. A program is one file, which includes this once.
#pragma once

#include <cuda_runtime_api.h>

#include "tests/support/on_device.hpp"

namespace longspan::tests {

std::unique_ptr<kernels::Backend> make_backend() {
  int gpus = 0;
  if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0) return nullptr;
  return kernels::cuda_backend();
}

}  // namespace longspan::tests
