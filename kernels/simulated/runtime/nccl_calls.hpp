// The frame of every call of NCCL, and the groups of calls of a thread.
#pragma once

#include <nccl.h>

#include <memory>
#include <vector>

#include "kernels/simulated/runtime/calls.hpp"
#include "kernels/simulated/runtime/nccl_comm.hpp"

/// The handle of a communicator for callers.
struct ncclComm {
  std::shared_ptr<longspan::simulated::Comm> own;
};

namespace longspan::simulated {

/// Runs body(lock) as a call of NCCL.
template <class Body>
ncclResult_t nccl_call(const char* name, const Body& body) {
  if (is_made_to_fail(name)) {
    nccl_error_text() = "made to fail";
    return ncclSystemError;
  }
  Lock lock(machine_mutex());
  return body(lock);
}

/// The calls of a thread since ncclGroupStart.
struct Group {
  struct Entry {
    std::shared_ptr<Comm> comm;
    cudaStream_t stream;
    std::vector<Piece> pieces;
    Comm::Then then = {};
  };
  int depth = 0;
  ncclResult_t error = ncclSuccess;
  std::vector<Entry> entries;
  std::vector<std::shared_ptr<Comm>> made;  // to be waited for
};

Group& group();

ncclResult_t refuse(const char* why);

/// Waits until a communicator that blocks is no longer in progress; then, or at once, returns its
/// state.
ncclResult_t settle(Lock& lock, const std::shared_ptr<Comm>& comm);

}  // namespace longspan::simulated
