/// \file
/// Interop with NCCL: the caller keeps `comm` alive and it stays the caller's to destroy.
#pragma once

#include <nccl.h>

#include "longspan/communicator.hpp"

namespace longspan {

/// The ranks of an NCCL communicator that exists already. Control messages travel over it too, so
/// a missing peer is known to be missing but not always by name (RankError::rank() is then -1).
Communicator from_nccl(ncclComm_t comm, CommOptions options = {.device = Device::cuda});

}  // namespace longspan
