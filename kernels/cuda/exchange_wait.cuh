// How the kernels of an exchange wait, and the lines by which ranks say what they exchange.
#pragma once

#include "kernels/cuda/arch/peer.cuh"
#include "kernels/cuda/exchange_route.hpp"

namespace longspan::kernels::cuda {

/// Of the block.
__device__ inline unsigned thread() { return threadIdx.y * blockDim.x + threadIdx.x; }

/// What a rank says of its exchange: 16 bytes that carry their epoch, once in each eight, which
/// memory moves as a whole.
__device__ inline uint4 header_of(const ExchangeParams& p, std::uint32_t epoch) {
  return {p.shape, epoch, static_cast<std::uint32_t>(p.merge.states.rows), epoch};
}
__device__ inline bool has_arrived(uint4 header, std::uint32_t epoch) {
  return header.y == epoch && header.w == epoch;
}
/// Whether what a rank says is there, and is something else than ours.
__device__ inline bool differs(const ExchangeParams& p, uint4 header, std::uint32_t epoch) {
  const uint4 own = header_of(p, epoch);
  return has_arrived(header, epoch) && (header.x != own.x || header.z != own.z);
}

/// A wait that ends: for data, for the deadline, or for the abort word.
class BoundedWait {
 public:
  /// `headers`: [ranks] lines in this rank's window.
  __device__ BoundedWait(const ExchangeParams& params, const Route&, std::uint32_t epoch,
                         const std::byte* headers)
      : p_(params), peers_(params.peers), headers_(headers), epoch_(epoch) {}

  /// Called after a look that found nothing; false: give up. `rank`: who is waited for.
  __device__ bool go_on(int rank) {
    if (++looks_ % kLooksBetweenClocks != 0) return true;
    const std::uint64_t now = arch::nanoseconds();
    if (start_ == 0) start_ = now;  // not before: reading the clock takes longer than most waits
    // One deadline for all waits of an exchange: whoever comes later does not wait again.
    if (arch::load_relaxed(&peers_.report->kind) != PeerReport::none) return false;
    if (arch::load_relaxed(peers_.abort) != 0) return fail(PeerReport::aborted, rank);
    if (now - start_ > peers_.deadline_ns) return time_out(rank);
    return true;
  }

  /// The first report of a window stays.
  __device__ bool fail(PeerReport::Kind kind, int rank) {
    PeerReport* report = peers_.report;
    if (atomicCAS_system(&report->kind, PeerReport::none, kind) == PeerReport::none) {
      report->rank = static_cast<std::uint32_t>(rank);
      report->epoch = epoch_;
      __threadfence_system();
    }
    return false;
  }

 private:
  static constexpr unsigned kLooksBetweenClocks = 64;

  /// Ranks with another number of rows may take another variant, and then wait for what is never
  /// sent: their headers tell. And a rank that sends nothing because it waits itself has sent its
  /// header: who has not is the one that did not come.
  __device__ bool time_out(int rank) {
    int absent = -1;
    for (int from = 0; from < peers_.ranks; ++from) {
      if (from == peers_.rank) continue;
      const uint4 header = arch::load_volatile(headers_ + WindowLayout::header(from));
      if (differs(p_, header, epoch_)) return fail(PeerReport::differs, from);
      if (absent < 0 && !has_arrived(header, epoch_)) absent = from;
    }
    return fail(PeerReport::timeout, absent < 0 ? rank : absent);
  }

  const ExchangeParams& p_;
  const PeerView& peers_;
  const std::byte* headers_;
  std::uint32_t epoch_;
  std::uint64_t start_ = 0;
  unsigned looks_ = 0;
};

}  // namespace longspan::kernels::cuda
