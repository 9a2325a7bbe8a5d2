// How kernels of several ranks meet that put rows into each other's memory: by counters in memory
// of every rank which all ranks can write. A communicator gives them (Transport::begin_puts), and
// strategies hand them to kernels.
//
//     put_rows:   wait for what others put here before, count `free` at every other rank
//                 wait for `free` of every other rank, put, count `here` behind each piece
//     attention:  wait for `here`, piece by piece
//     last:       count `ended` at every other rank, wait for `ended` of every other rank
//
// Counters only grow, and every run adds as much to them as every other, so that a replayed graph
// goes on counting, and what comes late disturbs nothing.
#pragma once

#include <cstdint>

#include "src/base/peer_view.hpp"

namespace longspan {

/// A rank's counters. They are zero when its memory is made. An abort makes all that it waits for
/// higher than any count.
struct PutFlags {
  static constexpr int kMostRanks = PeerView::kMostRanks;
  static constexpr std::uint64_t kRun = 256;  // that a run adds to `here`

  // Each rank counts here in its own place:
  std::uint64_t free[kMostRanks];   // runs whose rows it has room for
  std::uint64_t here[kMostRanks];   // what it has put here: what it says of the run (RunHeaders) is
                                    // 1, each piece is 1, and the last one the rest of kRun too
  std::uint64_t ended[kMostRanks];  // runs of which it has put all finished rows here

  // This rank's alone:
  std::uint64_t runs;          // of put_rows that are done
  std::uint64_t before;        // `here` of every rank ahead of the run at hand
  std::uint32_t blocks;        // of put_rows that have begun, modulo their number
  const std::uint32_t* abort;  // PeerView::abort, which the host can set while the driver is busy
};

/// The counters of all ranks, as one of them reaches them.
struct PutRanks {
  int rank = 0;
  int ranks = 0;  // 0: none
  PutFlags* flags[PutFlags::kMostRanks] = {};

  constexpr explicit operator bool() const { return ranks > 0; }
};

}  // namespace longspan
