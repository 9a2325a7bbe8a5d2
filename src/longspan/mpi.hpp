/// \file
/// Interop with MPI. The caller initialises and finalises MPI and keeps `comm` alive; longspan
/// works on a duplicate of it. Only the thread that calls longspan calls MPI; longspan computes on
/// its own threads. MPI_Init_thread with MPI_THREAD_FUNNELED is enough if that is the main thread,
/// otherwise MPI_THREAD_SERIALIZED is needed. Less is refused.
#pragma once

#include <mpi.h>

#include "longspan/communicator.hpp"

namespace longspan {

/// Host: states travel over MPI. CUDA: over NCCL, bootstrapped over MPI, with each rank on the GPU
/// of its local rank. Collective over `comm`.
Communicator from_mpi(MPI_Comm comm, CommOptions options = {});

}  // namespace longspan
