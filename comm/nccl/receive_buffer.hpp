// A receive buffer of each rank: memory that the copy engines of all ranks' GPUs write (CUDA IPC
// over NVLink or PCIe peer access). Unlike NCCL's, a shift into it takes no multiprocessor from
// kernels that run beside it.
//
//     receiver: raise `free` at the sender             ... wait `here`, lower it
//     sender:   wait `free`, lower it, copy, raise `here` at the receiver
//
// Each pair of ranks has the two flags of its distance. The sender copies to the place where it
// itself would receive, so all ranks of a shift receive at the same place of their receive buffers.
// Kernels also put rows into the receive buffers of all ranks, and meet by counters there
// (PutFlags).
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <memory>
#include <span>
#include <string>

#include "comm/nccl/peer_buffers.hpp"
#include "comm/transport.hpp"
#include "src/base/put_flags.hpp"

namespace longspan::comm {

class ReceiveBuffer {
 public:
  /// Opens the receive buffers. Collective. It is null on every rank, with the reason in `why`,
  /// where peer buffers are impossible, or a GPU cannot wait for flags in its streams.
  static std::shared_ptr<ReceiveBuffer> open(Transport& world, std::size_t bytes, std::string& why,
                                             std::shared_ptr<PeerBufferSet> set);

  /// Waits for the work of the GPU; past the deadline not for streams that wait for a peer.
  ~ReceiveBuffer();
  ReceiveBuffer(const ReceiveBuffer&) = delete;
  ReceiveBuffer& operator=(const ReceiveBuffer&) = delete;

  std::byte* data() const { return base(rank()); }
  bool holds(const void* memory) const;

  /// Queues a shift of pieces into this receive buffer, by a distance from 1 to ranks - 1.
  void shift(std::span<const Piece> pieces, int distance, cudaStream_t stream) const;

  /// The counters by which kernels that put rows into receive buffers meet.
  PutRanks put_ranks() const;

  /// The address here of `rank`'s memory that corresponds to `place` of this rank's buffer.
  std::byte* place_at(const void* place, int rank) const {
    return base(rank) + (static_cast<const std::byte*>(place) - data());
  }

 private:
  enum class Flag { free, here };

  ReceiveBuffer(std::unique_ptr<PeerBuffers> buffers, std::size_t bytes,
                std::chrono::milliseconds deadline);
  void prepare();

  int rank() const { return buffers_->view().rank; }
  int ranks() const { return buffers_->view().ranks; }
  std::byte* base(int rank) const { return buffers_->view().peer_buffer[rank]; }
  std::byte* flag(Flag which, int rank, int distance) const;

  struct OwnFlags;

  std::unique_ptr<PeerBuffers> buffers_;
  std::size_t bytes_;
  std::chrono::milliseconds deadline_;
  std::shared_ptr<OwnFlags> own_;  // shared with threads that abort
};

}  // namespace longspan::comm
