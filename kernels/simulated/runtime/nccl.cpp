// A stand-in for NCCL between ranks that are processes of one host, or threads of one process:
// communicators.
#include <nccl.h>

#include <cstring>
#include <memory>
#include <utility>

#include "kernels/simulated/runtime/nccl_calls.hpp"
#include "kernels/simulated/runtime/settings.hpp"
#include "kernels/simulated/runtime/waiting.hpp"

namespace longspan::simulated {

ncclResult_t refuse(const char* why) {
  nccl_error_text() = why;
  return ncclInvalidArgument;
}

ncclResult_t settle(Lock& lock, const std::shared_ptr<Comm>& comm) {
  if (comm->is_blocking()) wait_for_others(lock, [&] { return comm->state() != ncclInProgress; });
  return comm->state();
}

namespace {

ncclResult_t init(ncclComm_t* made, int size, const ncclUniqueId& id, int rank, bool blocking) {
  return nccl_call("ncclCommInitRankConfig", [&](Lock& lock) -> ncclResult_t {
    if (made == nullptr || size < 1 || rank < 0 || rank >= size)
      return refuse("the rank or the number of ranks");
    *made = nullptr;
    if (settings().gpus.empty()) return ncclUnhandledCudaError;
    if (id.internal[0] != '/') return refuse("an id that is not from ncclGetUniqueId");
    const auto comm = Comm::make(id.internal, rank, size, blocking);
    if (comm == nullptr) {
      nccl_error_text() = "no shared memory, or a rank that is there twice";
      return ncclSystemError;
    }
    *made = new ncclComm{comm};
    if (group().depth > 0) {
      group().made.push_back(comm);
      return ncclSuccess;
    }
    return settle(lock, comm);
  });
}

bool blocks(const ncclConfig_t* config, bool otherwise) {
  return config == nullptr || config->blocking == NCCL_CONFIG_UNDEF_INT ? otherwise
                                                                        : config->blocking != 0;
}

}  // namespace
}  // namespace longspan::simulated

using namespace longspan::simulated;

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  constexpr const char* kTexts[] = {
      "no error",
      "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
      "unhandled system error (run with NCCL_DEBUG=INFO for details)",
      "internal error - please report this issue to the NCCL developers",
      "invalid argument (run with NCCL_DEBUG=WARN for details)",
      "invalid usage (run with NCCL_DEBUG=WARN for details)",
      "remote process exited or there was a network error",
      "NCCL operation in progress"};
  return result >= 0 && result < ncclNumResults ? kTexts[result] : "unknown result code";
}

const char* ncclGetLastError(ncclComm_t) {
  thread_local std::string text;
  const Lock lock(machine_mutex());
  text = nccl_error_text();
  return text.c_str();
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  return nccl_call("ncclGetUniqueId", [&](Lock&) -> ncclResult_t {
    if (id == nullptr) return refuse("no place for an id");
    *id = {};
    std::strncpy(id->internal, fresh_segment_name().c_str(), sizeof id->internal - 1);
    return ncclSuccess;
  });
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
  return init(comm, size, id, rank, true);
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  return init(comm, size, id, rank, blocks(config, true));
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* made,
                           ncclConfig_t* config) {
  return nccl_call("ncclCommSplit", [&](Lock& lock) -> ncclResult_t {
    if (comm == nullptr || made == nullptr) return refuse("a communicator");
    *made = nullptr;
    std::shared_ptr<Comm> child;
    const std::shared_ptr<Comm> parent = comm->own;
    const ncclResult_t result =
        parent->split(color, key, blocks(config, parent->is_blocking()), child);
    if (result != ncclSuccess) return result;
    if (child != nullptr) *made = new ncclComm{child};
    const ncclResult_t own = settle(lock, parent);
    if (own != ncclSuccess || child == nullptr || !child->is_blocking()) return own;
    return settle(lock, child);
  });
}

ncclResult_t ncclCommCount(ncclComm_t comm, int* size) {
  return nccl_call("ncclCommCount", [&](Lock&) -> ncclResult_t {
    if (comm == nullptr || size == nullptr) return refuse("a communicator");
    *size = comm->own->size();
    return ncclSuccess;
  });
}
ncclResult_t ncclCommUserRank(ncclComm_t comm, int* rank) {
  return nccl_call("ncclCommUserRank", [&](Lock&) -> ncclResult_t {
    if (comm == nullptr || rank == nullptr) return refuse("a communicator");
    *rank = comm->own->rank();
    return ncclSuccess;
  });
}
ncclResult_t ncclCommCuDevice(ncclComm_t comm, int* device) {
  return nccl_call("ncclCommCuDevice", [&](Lock&) -> ncclResult_t {
    if (comm == nullptr || device == nullptr) return refuse("a communicator");
    *device = comm->own->device();
    return ncclSuccess;
  });
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* result) {
  return nccl_call("ncclCommGetAsyncError", [&](Lock&) -> ncclResult_t {
    if (comm == nullptr || result == nullptr) return refuse("a communicator");
    *result = comm->own->state();
    return ncclSuccess;
  });
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  return nccl_call("ncclCommFinalize", [&](Lock& lock) -> ncclResult_t {
    if (comm == nullptr) return refuse("a communicator");
    comm->own->finalize();
    return settle(lock, comm->own);
  });
}

/// Waits until every rank has called it, as ranks of one node do.
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  return nccl_call("ncclCommDestroy", [&](Lock& lock) -> ncclResult_t {
    if (comm == nullptr) return ncclSuccess;
    const std::shared_ptr<Comm> own = std::exchange(comm->own, nullptr);
    delete comm;
    own->finalize();
    wait_for_others(lock, [&] { return own->is_idle(); });
    own->leave();
    bool lost = false;
    wait_for_others(lock, [&] {
      lost = lost || own->has_lost_a_rank();
      return lost || own->have_all_left();
    });
    return lost ? ncclRemoteError : ncclSuccess;
  });
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  return nccl_call("ncclCommAbort", [&](Lock&) -> ncclResult_t {
    if (comm == nullptr) return ncclSuccess;
    comm->own->abort();
    delete comm;
    return ncclSuccess;
  });
}

}  // extern "C"
