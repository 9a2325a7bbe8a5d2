// The one seam between communication and kernels: how a kernel reaches the memory of the other
// ranks. A communicator fills it, an exchange kernel consumes it; where there is none, states
// travel by the all_gather verb.
//
// Every rank has a window of equal size, zeroed when it was made, which all ranks of the node can
// write. Exchanges are counted by `epoch`, in device memory, so that a replayed graph goes on
// counting. No wait is without end: a kernel that waits past the deadline, or sees the abort word,
// writes a report and returns.
#pragma once

#include <cstddef>
#include <cstdint>

namespace longspan {

/// What an exchange kernel found wrong; `kind` none while all is well.
struct PeerReport {
  enum Kind : std::uint32_t { none, timeout, aborted, differs };
  std::uint32_t kind;
  std::uint32_t rank;  // the rank that did not arrive, or that differs
  std::uint32_t epoch;
  std::uint32_t unused;
};

struct PeerView {
  static constexpr int kMostRanks = 8;

  int rank = 0;
  int ranks = 1;
  std::byte* window[kMostRanks] = {};  // [ranks], `bytes` each; [rank] is this rank's own
  std::size_t bytes = 0;
  std::uint32_t* epoch = nullptr;  // [2] device: exchanges done, blocks done of the one at hand
  std::uint32_t* abort = nullptr;  // [1] seen by host and device: not 0 stops every wait
  PeerReport* report = nullptr;    // [1] seen by host and device
  std::uint64_t deadline_ns = 0;   // of one exchange

  explicit operator bool() const { return epoch != nullptr; }
};

}  // namespace longspan
