// Copies a part to the place that it is sent from, on the host.
#include "tests/support/pack_outputs_tests.hpp"

namespace longspan::tests {

std::unique_ptr<kernels::Backend> make_backend() { return kernels::host_backend(2); }

}  // namespace longspan::tests
