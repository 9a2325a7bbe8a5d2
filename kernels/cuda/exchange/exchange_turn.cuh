// Tells which exchange a kernel makes, what each of its blocks does in it, and how it is counted.
#pragma once

#include "kernels/cuda/arch/overlap.cuh"
#include "kernels/cuda/exchange/exchange_wait.cuh"

namespace longspan::kernels::cuda {

/// What a kernel is told. The route comes first, for the reason that Route gives.
struct Task {
  Route route;
  ExchangeParams params;
  bool wide;  // results may be stored as many columns at a time as a thread has
};

/// Block 0 compares what the ranks say of the exchange; the other blocks carry states. Such a block
/// takes one row for each threadIdx.y at once, from first_rows() on, and its next rows are
/// `row_step` further on.
__device__ inline std::uint32_t first_rows() { return (blockIdx.x - 1) * blockDim.y; }
__device__ inline std::uint32_t row_step() { return (gridDim.x - 1) * blockDim.y; }

/// Which exchange this is. It is made after the loads of the first own rows, which then travel
/// together with the epoch.
struct Turn {
  std::uint32_t epoch;
  std::uint32_t index;  // of the copy
  std::uint64_t copy;   // from the start of every peer buffer

  __device__ explicit Turn(const Route& r)
      : epoch(next_epoch(arch::load_relaxed(r.epoch))),
        index(copy_of(epoch)),
        copy(r.copies + std::uint64_t{index} * r.copy_bytes) {}
};

/// The last block that has read the epoch counts it up to this exchange's. It is made after a
/// barrier that all threads came to with their epoch in hand; the count that it asks for is looked
/// at when the kernel ends.
class Departure {
 public:
  __device__ explicit Departure(const ExchangeParams& p) {
    if (thread() == 0) before_ = atomicAdd(p.peers.epoch + 1, 1u);
  }
  __device__ void leave(const ExchangeParams& p, const Turn& turn) const {
    if (thread() != 0 || before_ + 1 != gridDim.x) return;
    arch::store_relaxed(p.peers.epoch + 1, 0);
    arch::store_relaxed(p.peers.epoch, turn.epoch);
  }

 private:
  unsigned before_ = 0;
};

/// The work of block 0: what the ranks must agree on travels as a line of its own, which a thread
/// sends to each peer. It is there before the states are, and no block that carries states has to
/// look for it.
__device__ inline void compare_headers(const Route& r, const ExchangeParams& p) {
  arch::wait_for_kernels_before();
  const Turn turn(r);
  if (thread() < r.peers) {
    arch::store_volatile(
        r.peer_buffer[thread()] + turn.copy + PeerBufferLayout::header(p.peers.rank),
        header_of(p, turn.epoch));
    const int from = r.rank[thread()];
    const std::byte* headers = r.own + turn.copy;
    BoundedWait wait(p, r, turn.epoch, headers);
    for (;;) {
      const uint4 header = arch::load_volatile(headers + PeerBufferLayout::header(from));
      if (differs(p, header, turn.epoch)) wait.fail(PeerReport::differs, from);
      if (has_arrived(header, turn.epoch) || !wait.go_on(from)) break;
    }
  }
  __syncthreads();
  Departure(p).leave(p, turn);
}

}  // namespace longspan::kernels::cuda
