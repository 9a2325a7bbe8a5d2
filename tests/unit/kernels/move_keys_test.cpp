// Moves keys from a place of any form to another, on the host.
#include "tests/support/move_keys_tests.hpp"

namespace longspan::tests {

std::unique_ptr<kernels::Backend> make_backend() { return kernels::host_backend(2); }

}  // namespace longspan::tests
