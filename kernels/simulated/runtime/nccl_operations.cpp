// Calls that move bytes between ranks, alone and in groups, and the one operation that adds.
#include <memory>
#include <utility>

#include "kernels/simulated/runtime/memory.hpp"
#include "kernels/simulated/runtime/nccl_calls.hpp"
#include "longspan/element.hpp"

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

/// Whether a GPU can reach the memory.
bool is_reachable(const void* data, std::size_t bytes) {
  return bytes == 0 || (data != nullptr && look_up(data, bytes).where == Where::inside);
}

/// Queues the contents of a group, as one operation for each communicator.
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
      if (first.then && more.then)
        first.then = [one = std::move(first.then), other = std::move(more.then)] {
          one();
          other();
        };
      else if (more.then)
        first.then = std::move(more.then);
      more.comm = nullptr;
    }
    const ncclResult_t result =
        first.comm->queue(std::move(first.pieces), first.stream, std::move(first.then));
    if (worst == ncclSuccess || worst == ncclInProgress)
      if (result != ncclSuccess) worst = result;
  }
  return worst;
}

/// Queues the call, or adds it to the thread's group.
ncclResult_t add(ncclComm_t comm, cudaStream_t stream, std::vector<Piece> pieces,
                 Comm::Then then = {}) {
  Group::Entry entry{comm->own, stream, std::move(pieces), std::move(then)};
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

/// The sum of `parts` [parts, count] of all ranks. Its order is that of no rank, as with NCCL's
/// algorithms: from the rank after this one on, around the ring. 16-bit sums are rounded at every
/// step.
void add_up(const std::vector<std::byte>& parts, void* sum, std::size_t count, DType dtype,
            int rank, int size) {
  for (std::size_t i = 0; i < count; ++i)
    for (int step = 1; step <= size; ++step) {
      const auto p = static_cast<std::size_t>((rank + step) % size);
      const float one = load_element(parts.data(), dtype, static_cast<std::int64_t>(p * count + i));
      const auto place = static_cast<std::int64_t>(i);
      store_element(sum, dtype, place, step == 1 ? one : load_element(sum, dtype, place) + one);
    }
}

/// An address for a piece that may have no bytes.
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

ncclResult_t ncclReduceScatter(const void* send, void* recv, size_t count, ncclDataType_t type,
                               ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream) {
  return nccl_call("ncclReduceScatter", [&](Lock&) -> ncclResult_t {
    const bool is_float = type == ncclFloat32 || type == ncclFloat16 || type == ncclBfloat16;
    if (comm == nullptr || !is_float || operation != ncclSum)
      return refuse_in_group("a communicator, or a sum that this stand-in does not know");
    const int size = comm->own->size(), rank = comm->own->rank();
    const std::size_t bytes = count * size_of(type), all = bytes * static_cast<std::size_t>(size);
    if (!is_reachable(send, all) || !is_reachable(recv, bytes))
      return refuse_in_group("memory that no GPU reaches");
    if (bytes == 0) return ncclSuccess;
    const auto parts = std::make_shared<std::vector<std::byte>>(all);
    std::vector<Piece> pieces;
    for (int p = 0; p < size; ++p) {
      const std::size_t place = static_cast<std::size_t>(p) * bytes;
      pieces.push_back(
          {.peer = p, .from = static_cast<const std::byte*>(send) + place, .bytes = bytes});
      pieces.push_back({.peer = p, .to = parts->data() + place, .bytes = bytes});
    }
    const longspan::DType dtype = type == ncclFloat32   ? longspan::fp32
                                  : type == ncclFloat16 ? longspan::fp16
                                                        : longspan::bf16;
    return add(comm, stream, std::move(pieces),
               [=] { add_up(*parts, recv, count, dtype, rank, size); });
  });
}

ncclResult_t ncclBroadcast(const void* send, void* recv, size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream) {
  return nccl_call("ncclBroadcast", [&](Lock&) -> ncclResult_t {
    if (comm == nullptr || size_of(type) == 0 || root < 0 || root >= comm->own->size())
      return refuse_in_group("a communicator, a root or a type");
    const bool is_root = comm->own->rank() == root;
    const std::size_t bytes = count * size_of(type);
    if (!is_reachable(recv, bytes) || (is_root && !is_reachable(send, bytes)))
      return refuse_in_group("memory that no GPU reaches");
    if (bytes == 0) return ncclSuccess;
    std::vector<Piece> pieces{{.peer = root, .to = static_cast<std::byte*>(recv), .bytes = bytes}};
    for (int p = 0; is_root && p < comm->own->size(); ++p)
      pieces.push_back({.peer = p, .from = static_cast<const std::byte*>(send), .bytes = bytes});
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
