// The ranks of mpirun, where MPI may not be initialised yet.
#pragma once

#include "longspan/communicator.hpp"

namespace longspan::comm {

/// `size`: the ranks that the launcher announces; 0: not known.
Communicator from_mpirun(const CommOptions& options, int size);

}  // namespace longspan::comm
