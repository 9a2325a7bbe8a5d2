// The ranks of mpirun, where MPI may not be initialised yet.
#pragma once

#include "longspan/communicator.hpp"

namespace longspan::comm {

/// `size` is the number of ranks that the launcher announces, or 0 where it is unknown.
Communicator from_mpirun(const CommOptions& options, int size);

}  // namespace longspan::comm
