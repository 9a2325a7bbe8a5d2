// New keys and values into a cache, on the host.
#include "tests/support/append_tests.hpp"

namespace longspan::tests {

std::unique_ptr<kernels::Backend> make_backend() { return kernels::host_backend(2); }

}  // namespace longspan::tests
