// Faults of a request's arrays, found on the host.
#include "tests/support/check_arrays_tests.hpp"

namespace longspan::tests {

std::unique_ptr<kernels::Backend> make_backend() { return kernels::host_backend(2); }

}  // namespace longspan::tests
