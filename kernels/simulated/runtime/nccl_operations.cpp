// What moves bytes between ranks, alone and in groups.
#include <utility>

#include "kernels/simulated/runtime/memory.hpp"
#include "kernels/simulated/runtime/nccl_calls.hpp"

namespace longspan::simulated {
namespace {

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

Group& group() {
  thread_local Group one;
  return one;
}

}  // namespace longspan::simulated

using namespace longspan::simulated;

extern "C" {

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
