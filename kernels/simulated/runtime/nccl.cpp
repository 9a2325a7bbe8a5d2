// A stand-in for NCCL between ranks that are processes of one host, or threads of one process.
#include <nccl.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/simulated/runtime/memory.hpp"
#include "kernels/simulated/runtime/nccl_comm.hpp"
#include "kernels/simulated/runtime/settings.hpp"
#include "kernels/simulated/runtime/waiting.hpp"

/// What callers know a communicator by.
struct ncclComm {
  std::shared_ptr<longspan::simulated::Comm> own;
};

namespace longspan::simulated {
namespace {

/// What a thread has called since ncclGroupStart.
struct Group {
  struct Entry {
    std::shared_ptr<Comm> comm;
    cudaStream_t stream;
    std::vector<Piece> pieces;
  };
  int depth = 0;
  ncclResult_t error = ncclSuccess;
  std::vector<Entry> entries;
  std::vector<std::shared_ptr<Comm>> made;  // to be waited for
};

Group& group() {
  thread_local Group one;
  return one;
}

/// body(lock) as a call of NCCL.
template <class Body>
ncclResult_t nccl_call(const char* name, const Body& body) {
  if (is_made_to_fail(name)) {
    nccl_error_text() = "made to fail";
    return ncclSystemError;
  }
  Lock lock(machine_mutex());
  return body(lock);
}

ncclResult_t refuse(const char* why) {
  nccl_error_text() = why;
  return ncclInvalidArgument;
}

std::size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    default:
      return 0;
  }
}

/// Memory that a GPU can reach.
bool is_reachable(const void* data, std::size_t bytes) {
  return bytes == 0 || (data != nullptr && look_up(data, bytes).where == Where::inside);
}

/// Until a communicator that blocks is no longer in progress; else how it stands.
ncclResult_t settle(Lock& lock, const std::shared_ptr<Comm>& comm) {
  if (comm->is_blocking()) wait_for_others(lock, [&] { return comm->state() != ncclInProgress; });
  return comm->state();
}

/// What a group holds, one operation for each communicator.
ncclResult_t queue_all(std::vector<Group::Entry> entries) {
  ncclResult_t worst = ncclSuccess;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    Group::Entry& first = entries[i];
    if (first.comm == nullptr) continue;
    for (std::size_t j = i + 1; j < entries.size(); ++j) {
      Group::Entry& more = entries[j];
      if (more.comm != first.comm) continue;
      if (more.stream != first.stream) return refuse("a group with several streams of a rank");
      first.pieces.insert(first.pieces.end(), more.pieces.begin(), more.pieces.end());
      more.comm = nullptr;
    }
    const ncclResult_t result = first.comm->queue(std::move(first.pieces), first.stream);
    if (worst == ncclSuccess || worst == ncclInProgress)
      if (result != ncclSuccess) worst = result;
  }
  return worst;
}

/// Queues, or adds to the thread's group.
ncclResult_t add(ncclComm_t comm, cudaStream_t stream, std::vector<Piece> pieces) {
  Group::Entry entry{comm->own, stream, std::move(pieces)};
  if (group().depth == 0) return queue_all({std::move(entry)});
  group().entries.push_back(std::move(entry));
  return ncclSuccess;
}

ncclResult_t refuse_in_group(const char* why) {
  const ncclResult_t error = refuse(why);
  if (group().depth > 0 && group().error == ncclSuccess) group().error = error;
  return error;
}

ncclResult_t init(ncclComm_t* made, int size, const ncclUniqueId& id, int rank, bool blocking) {
  return nccl_call("ncclCommInitRankConfig", [&](Lock& lock) -> ncclResult_t {
    if (made == nullptr || size < 1 || rank < 0 || rank >= size)
      return refuse("the rank or the number of ranks");
    *made = nullptr;
    if (settings().gpus.empty()) return ncclUnhandledCudaError;
    if (id.internal[0] != '/') return refuse("an id that is none of ncclGetUniqueId");
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

ncclResult_t send_or_receive(const char* name, Piece piece, ncclDataType_t type, ncclComm_t comm,
                             cudaStream_t stream) {
  return nccl_call(name, [&](Lock&) -> ncclResult_t {
    if (comm == nullptr || piece.peer < 0 || piece.peer >= comm->own->size() || size_of(type) == 0)
      return refuse_in_group("a communicator, a peer or a type");
    piece.bytes *= size_of(type);
    const void* const data = piece.to != nullptr ? piece.to : piece.from;
    if (!is_reachable(data, piece.bytes)) return refuse_in_group("memory that no GPU reaches");
    return add(comm, stream, {piece});
  });
}

/// Where a piece of no bytes stands for something: it has to have a place.
std::byte* place_of(const void* data) {
  static std::byte nothing;
  return data == nullptr ? &nothing : static_cast<std::byte*>(const_cast<void*>(data));
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

/// Waits until every rank has come to it, as ranks of one node do.
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

ncclResult_t ncclAllGather(const void* send, void* recv, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  return nccl_call("ncclAllGather", [&](Lock&) -> ncclResult_t {
    const std::size_t bytes = count * size_of(type);
    if (comm == nullptr || size_of(type) == 0) return refuse_in_group("a communicator or a type");
    const int size = comm->own->size();
    if (!is_reachable(send, bytes) || !is_reachable(recv, bytes * static_cast<std::size_t>(size)))
      return refuse_in_group("memory that no GPU reaches");
    if (bytes == 0) return ncclSuccess;
    std::vector<Piece> pieces;
    for (int p = 0; p < size; ++p) {
      pieces.push_back({.peer = p, .from = static_cast<const std::byte*>(send), .bytes = bytes});
      pieces.push_back({.peer = p,
                        .to = static_cast<std::byte*>(recv) + static_cast<std::size_t>(p) * bytes,
                        .bytes = bytes});
    }
    return add(comm, stream, std::move(pieces));
  });
}

ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return send_or_receive("ncclSend", {.peer = peer, .from = place_of(data), .bytes = count}, type,
                         comm, stream);
}
ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return send_or_receive("ncclRecv", {.peer = peer, .to = place_of(data), .bytes = count}, type,
                         comm, stream);
}

ncclResult_t ncclGroupStart() {
  ++group().depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  if (group().depth == 0) return ncclInvalidUsage;
  if (--group().depth > 0) return ncclSuccess;
  const Group all = std::exchange(group(), {});
  return nccl_call("ncclGroupEnd", [&](Lock& lock) -> ncclResult_t {
    ncclResult_t result = all.error;
    for (const auto& comm : all.made)
      if (result == ncclSuccess || result == ncclInProgress)
        if (const ncclResult_t one = settle(lock, comm); one != ncclSuccess) result = one;
    if (result != ncclSuccess && result != ncclInProgress) return result;
    const ncclResult_t queued = queue_all(all.entries);
    return queued != ncclSuccess ? queued : result;
  });
}

}  // extern "C"
