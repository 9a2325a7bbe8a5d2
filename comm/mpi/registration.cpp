// The object file that the target longspan::mpi puts into every program that links it. A linker
// takes from a static library, and keeps of the shared ones (--as-needed), what an object of the
// program refers to; this one refers to MPI's part where the program itself does not.
#include "comm/mpi/registration.hpp"

namespace {

[[maybe_unused]] const bool registered = longspan::comm::register_mpi();

}  // namespace
