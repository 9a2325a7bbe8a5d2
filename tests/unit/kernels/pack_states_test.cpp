// Copies states to the place that they are sent from, on the host.
#include "tests/support/pack_states_tests.hpp"

namespace longspan::tests {

std::unique_ptr<kernels::Backend> make_backend() { return kernels::host_backend(2); }

}  // namespace longspan::tests
