/// \file
/// Interop with NCCL: the caller keeps `comm` alive and destroys it.
#pragma once

#include <nccl.h>

#include "longspan/communicator.hpp"

namespace longspan {

/// The ranks of an existing NCCL communicator. Control messages travel over it too, so a missing
/// peer is noticed but not always identified (RankError::rank() is then -1).
Communicator from_nccl(ncclComm_t comm, CommOptions options = {.device = Device::cuda});

}  // namespace longspan
