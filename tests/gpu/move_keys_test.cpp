// Keys from a place of any form to another, on a GPU.
#include "tests/support/move_keys_tests.hpp"

#include <cuda_runtime_api.h>

namespace longspan::tests {

std::unique_ptr<kernels::Backend> make_backend() {
  int gpus = 0;
  if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0) return nullptr;
  return kernels::cuda_backend();
}

}  // namespace longspan::tests
