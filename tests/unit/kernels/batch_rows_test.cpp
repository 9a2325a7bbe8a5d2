// Queries and results in a model's layout, on the host.
#include "tests/support/batch_rows_tests.hpp"

namespace longspan::tests {

std::unique_ptr<kernels::Backend> make_backend() { return kernels::host_backend(2); }

Communicator ranks_on(Device device) { return self(device); }

}  // namespace longspan::tests
