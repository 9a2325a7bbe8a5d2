// How kernels of several ranks that put rows into each other's memory synchronise: by counters in
// memory of every rank, which all ranks can write. A communicator allocates them
// (Transport::begin_puts), and strategies pass them to kernels.
//
//     put_rows:   wait for earlier puts of others here, increment `free` at every other rank
//                 wait for `free` of every other rank, put, increment `here` after each piece
//     attention:  wait for `here`, piece by piece
//     last:       increment `ended` at every other rank, wait for `ended` of every other rank
//
// Counters only grow, and every run adds the same amount to them. A replayed graph therefore
// continues the count, and late increments do no harm.
#pragma once

#include <cstdint>

#include "src/base/peer_view.hpp"

namespace longspan {

/// A rank's counters, zero when its memory is made. An abort sets all that it waits for higher than
/// any count.
struct PutFlags {
  static constexpr int kMostRanks = PeerView::kMostRanks;
  static constexpr std::uint64_t kRun = 256;  // increment of `here` per run

  // Each rank increments its own entry of these:
  std::uint64_t free[kMostRanks];   // runs whose rows it has room for
  std::uint64_t here[kMostRanks];   // pieces that it has put here: its report of the run
                                    // (RunHeaders) counts 1 and each piece 1; the last piece also
                                    // adds what is missing to kRun
  std::uint64_t ended[kMostRanks];  // runs of which it has put all finished rows here

  // Only this rank writes these:
  std::uint64_t runs;          // runs of put_rows that are done
  std::uint64_t before;        // `here` of every rank, before the current run
  std::uint32_t blocks;        // blocks of put_rows that have begun, modulo their number
  const std::uint32_t* abort;  // PeerView::abort, which the host can set while the driver is busy
};

/// The counters of all ranks, as one of them addresses them.
struct PutRanks {
  int rank = 0;
  int ranks = 0;  // 0: none
  PutFlags* flags[PutFlags::kMostRanks] = {};

  constexpr explicit operator bool() const { return ranks > 0; }
};

}  // namespace longspan
