// How the kernels of an exchange wait, and the header lines in which ranks describe their exchange.
#pragma once

#include "kernels/cuda/arch/peer.cuh"
#include "kernels/cuda/exchange/exchange_route.hpp"

namespace longspan::kernels::cuda {

/// The index of a thread in its plane threadIdx.z, and in the block. A block has several planes if
/// the splits of the own states fold before an exchange (exchange_parts.cu), otherwise one.
__device__ inline unsigned plane_thread() { return threadIdx.y * blockDim.x + threadIdx.x; }
__device__ inline unsigned thread() {
  return threadIdx.z * blockDim.y * blockDim.x + plane_thread();
}

/// A rank's header of its exchange: 16 bytes with the epoch once in each eight, since memory moves
/// eight as a unit.
__device__ inline uint4 header_of(const ExchangeParams& p, std::uint32_t epoch) {
  const std::uint64_t word = run_digest(p.hash, p.contents);
  return {static_cast<std::uint32_t>(word), epoch, static_cast<std::uint32_t>(word >> 32), epoch};
}
__device__ inline bool has_arrived(uint4 header, std::uint32_t epoch) {
  return header.y == epoch && header.w == epoch;
}
/// Whether a rank's header has arrived, and differs from this one's.
__device__ inline bool differs(const ExchangeParams& p, uint4 header, std::uint32_t epoch) {
  const uint4 own = header_of(p, epoch);
  return has_arrived(header, epoch) && (header.x != own.x || header.z != own.z);
}

/// A wait that ends by data, by the deadline, or by the abort word.
///
/// Many threads wait at once, and most for less than a microsecond. From time to time they read, in
/// this GPU's memory, whether a thread has stopped. One warp of all that wait, another each time,
/// reads the clock and the abort word, which is in host memory. It is only one because host memory
/// answers requests for one word one after another, in 0.55 us each. If every warp asked, a rank
/// that was late once would keep the others in that queue for longer than it was late. Then they
/// would be late, and so on back and forth, at milliseconds an exchange.
class BoundedWait {
 public:
  /// `copy` is the start of the copy in this rank's own peer buffer.
  __device__ BoundedWait(const ExchangeParams& params, const ExchangeRoute& route,
                         std::uint32_t epoch, const std::byte* copy)
      : p_(params), watch_(*reinterpret_cast<Watch*>(route.own)), headers_(copy), epoch_(epoch) {}

  /// Called after a poll that found nothing; false if the wait has to end. `rank` is the awaited
  /// rank.
  __device__ bool go_on(int rank) {
    if (++looks_ % kLooks != 0) return true;
    if (arch::load_relaxed(&watch_.stopped) != 0) return false;
    if (static_cast<int>(thread() % 32) != __ffs(__activemask()) - 1) return true;
    const unsigned warps = gridDim.x * ((blockDim.x * blockDim.y * blockDim.z + 31) / 32);
    return atomicAdd(&watch_.turns, 1u) % warps != 0 || look_up(rank);
  }

  /// Reports a fault. The first report of a peer buffer is kept.
  __device__ bool fail(PeerReport::Kind kind, int rank) {
    using Word = unsigned long long;
    const PeerReport report{kind, static_cast<std::uint32_t>(rank), p_.run};
    const Word nothing = PeerReport{}.word();
    atomicCAS_system(reinterpret_cast<Word*>(p_.peers.report), nothing, Word{report.word()});
    arch::store_relaxed(&watch_.stopped, 1);
    return false;
  }

 private:
  // This many polls take far longer than all warps of a GPU need to add to one word.
  static constexpr unsigned kLooks = 256;
  static constexpr int kTickBits = 20;  // about a millisecond

  /// Whether the wait may continue. There is one deadline for all waits of an exchange, counted
  /// from the first read of the clock.
  __device__ bool look_up(int rank) {
    if (arch::load_relaxed(p_.peers.abort) != 0) return fail(PeerReport::aborted, rank);
    const auto now = static_cast<std::uint32_t>(arch::nanoseconds() >> kTickBits);
    const std::uint64_t first = arch::load_whole(&watch_.began);
    if (static_cast<std::uint32_t>(first) != epoch_) {
      arch::store_whole(&watch_.began, epoch_ | std::uint64_t{now} << 32);
      return true;
    }
    // They are below 0 if another multiprocessor's clock, or a later read, was a tick ahead.
    const std::int64_t ticks =
        static_cast<std::int32_t>(now - static_cast<std::uint32_t>(first >> 32));
    return ticks <= static_cast<std::int64_t>(p_.peers.deadline_ns >> kTickBits) || time_out(rank);
  }

  /// Finds the rank at fault. Ranks with another number of rows may use another variant, and then
  /// wait for words that are never sent; their headers show it. A rank that sends nothing because
  /// it waits itself has sent its header, so the one without a header is the one that did not come.
  __device__ bool time_out(int rank) {
    int absent = -1;
    for (int from = 0; from < p_.peers.ranks; ++from) {
      if (from == p_.peers.rank) continue;
      const uint4 header = arch::load_volatile(headers_ + PeerBufferLayout::header(from));
      if (differs(p_, header, epoch_)) return fail(PeerReport::differs, from);
      if (absent < 0 && !has_arrived(header, epoch_)) absent = from;
    }
    return fail(PeerReport::timeout, absent < 0 ? rank : absent);
  }

  const ExchangeParams& p_;
  Watch& watch_;
  const std::byte* headers_;
  std::uint32_t epoch_;
  unsigned looks_ = 0;
};

}  // namespace longspan::kernels::cuda
