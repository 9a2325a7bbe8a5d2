// The object file that the target longspan::mpi puts into every program that links it. Linkers use
// of a static library, and keep of shared ones (--as-needed), only what an object of the program
// refers to. This object refers to MPI's part where the program itself does not.
#include "comm/mpi/registration.hpp"

namespace {

[[maybe_unused]] const bool registered = longspan::comm::register_mpi();

}  // namespace
