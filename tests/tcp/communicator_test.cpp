// Communicators over TCP, of ranks that have an exchange.
#include "tests/communicator_tests.hpp"

#include "tests/tcp/ranks.hpp"

namespace longspan::testing {

Communicator make_world(CommOptions options) {
  return from_exchange(own_rank(), all_ranks(), tell_all, options);
}
void meet() { tell_all(""); }

}  // namespace longspan::testing
