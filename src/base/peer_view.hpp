// The only interface between communication and kernels: how a kernel reaches the memory of the
// other ranks. A communicator fills it, and an exchange kernel uses it. Without it, states travel
// by the all_gather collective.
//
// Every rank has a peer buffer of equal size, zeroed when it was made, which all ranks of the node
// can write. Exchanges are counted by `epoch`, in device memory, so that a replayed graph continues
// the count. Every wait is bounded: a kernel that waits past the deadline, or sees the abort word,
// writes a report and returns. A layer has its own peer buffers, and so its own epoch and report.
#pragma once

#include <cstddef>
#include <cstdint>

namespace longspan {

/// What an exchange kernel found wrong; `kind` is none if all is well. It travels as one word of 64
/// bits, 0 for none, so a reader that sees a report sees all of it.
struct PeerReport {
  enum Kind : std::uint8_t { none, timeout, aborted, differs };
  Kind kind = none;
  std::uint32_t rank = 0;  // the rank that did not arrive, or that differs; below 2^24
  std::uint32_t run = 0;   // of the layer: comm::RunName::run

  constexpr std::uint64_t word() const {
    return std::uint64_t{run} << 32 | std::uint64_t{rank} << 8 | kind;
  }
  static constexpr PeerReport of(std::uint64_t word) {
    return {static_cast<Kind>(word & 0xff), static_cast<std::uint32_t>(word) >> 8,
            static_cast<std::uint32_t>(word >> 32)};
  }
};

struct PeerView {
  static constexpr int kMostRanks = 8;

  int rank = 0;
  int ranks = 1;
  std::byte* peer_buffer[kMostRanks] = {};  // [ranks], `bytes` each; [rank] is this rank's own
  std::size_t bytes = 0;
  std::uint32_t* epoch = nullptr;   // [2] device: exchanges done, blocks done of the current one
  std::uint32_t* abort = nullptr;   // [1] shared by host and device: not 0 stops every wait
  std::uint64_t* report = nullptr;  // [1] shared by host and device: PeerReport::word, the first
  std::uint64_t deadline_ns = 0;    // for one exchange

  explicit operator bool() const { return epoch != nullptr; }
};

}  // namespace longspan
