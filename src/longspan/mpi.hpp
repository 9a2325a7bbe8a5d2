/// \file
/// Interop with MPI. The caller initialises and finalises MPI and keeps `comm` alive; longspan
/// works on a duplicate of it. The thread that calls longspan calls MPI, and longspan computes on
/// threads of its own: MPI_Init_thread with MPI_THREAD_FUNNELED is enough where that is the main
/// thread, and MPI_THREAD_SERIALIZED elsewhere. Less is refused.
#pragma once

#include <mpi.h>

#include "longspan/communicator.hpp"

namespace longspan {

/// Host: states travel over MPI. CUDA: over NCCL, bootstrapped over MPI, each rank on the GPU of
/// its local rank. Collective over `comm`.
Communicator from_mpi(MPI_Comm comm, CommOptions options = {});

}  // namespace longspan
