// The edges of a merge of states, on the host.
#include "tests/support/merge_states_tests.hpp"

namespace longspan::tests {

std::unique_ptr<kernels::Backend> make_backend() { return kernels::host_backend(2); }

}  // namespace longspan::tests
