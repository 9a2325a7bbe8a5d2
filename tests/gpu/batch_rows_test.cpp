// Queries and results in a model's layout, on a GPU.
#include "tests/support/batch_rows_tests.hpp"

#include <cuda_runtime_api.h>

namespace longspan::tests {

std::unique_ptr<kernels::Backend> make_backend() {
  int gpus = 0;
  if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0) return nullptr;
  return kernels::cuda_backend();
}

Communicator ranks_on(Device device) { return self(device); }

}  // namespace longspan::tests
