// Interop with MPI. The caller initialises and finalises MPI and keeps `comm` alive; longspan works
// on a duplicate of it.
#pragma once

#include <mpi.h>

#include "longspan/communicator.hpp"

namespace longspan {

/// Host: states travel over MPI. CUDA: over NCCL, bootstrapped over MPI, each rank on the GPU of
/// its local rank. Collective over `comm`.
Communicator from_mpi(MPI_Comm comm, CommOptions options = {});

}  // namespace longspan
