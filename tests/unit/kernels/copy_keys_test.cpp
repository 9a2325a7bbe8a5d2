// Copies keys to rows side by side, on the host.
#include "tests/support/copy_keys_tests.hpp"

namespace longspan::tests {

std::unique_ptr<kernels::Backend> make_backend() { return kernels::host_backend(2); }

}  // namespace longspan::tests
