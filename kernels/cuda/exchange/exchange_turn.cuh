// Which exchange a kernel makes, what each of its blocks does in it, and how it is counted.
#pragma once

#include "kernels/cuda/arch/overlap.cuh"
#include "kernels/cuda/exchange/exchange_wait.cuh"

namespace longspan::kernels::cuda {

/// The arguments of a kernel. The route comes first, for the reason given at Route.
struct Task {
  ExchangeRoute route;
  ExchangeParams params;
  bool wide;  // results may be stored with all columns of a thread at a time
};

/// Block 0 compares the ranks' headers of the exchange; the other blocks carry states. Such a block
/// takes one row for each threadIdx.y at once, from first_rows() on, and its next rows are
/// `row_step` further on.
__device__ inline std::uint32_t first_rows() { return (blockIdx.x - 1) * blockDim.y; }
__device__ inline std::uint32_t row_step() { return (gridDim.x - 1) * blockDim.y; }

/// Which exchange this is. It is read after the loads of the first own rows are issued, so that
/// they overlap.
struct Turn {
  std::uint32_t epoch;
  std::uint32_t index;  // of the copy
  std::uint64_t copy;   // offset from the start of every peer buffer

  __device__ explicit Turn(const ExchangeRoute& r)
      : epoch(next_epoch(arch::load_relaxed(r.epoch))),
        index(copy_of(epoch)),
        copy(r.copies + std::uint64_t{index} * r.copy_bytes) {}
};

/// The last block that has read the epoch advances it to this exchange's. It is constructed after a
/// barrier that all threads reach with their epoch read; the counter that it requests is used when
/// the kernel ends.
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

/// The work of block 0: the values that ranks must agree on travel as a separate line, which a
/// thread sends to each peer. It arrives before the states, and no block that carries states has to
/// poll for it.
__device__ inline void compare_headers(const ExchangeRoute& r, const ExchangeParams& p) {
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
