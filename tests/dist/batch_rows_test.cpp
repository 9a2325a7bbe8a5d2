// Queries and results in a model's layout, on every rank count: by gathered states, and on GPUs by
// peer buffers.
#include "tests/support/batch_rows_tests.hpp"

#include "tests/dist/world.hpp"

namespace longspan::tests {

std::unique_ptr<kernels::Backend> make_backend() {
  return wants_gpus() ? kernels::cuda_backend() : kernels::host_backend(1);
}

Communicator ranks_on(Device) { return test_world(); }

}  // namespace longspan::tests
