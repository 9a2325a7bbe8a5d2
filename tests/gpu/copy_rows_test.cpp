// Blocks of rows, on a GPU.
#include "tests/support/copy_rows_tests.hpp"

#include <cuda_runtime_api.h>

namespace longspan::tests {

std::unique_ptr<kernels::Backend> make_backend() {
  int gpus = 0;
  if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0) return nullptr;
  return kernels::cuda_backend();
}

}  // namespace longspan::tests
