// The layout of a peer buffer. It holds data that the rank keeps for itself, then copies of what
// others write, one for each of the exchanges that may be in flight at once.
//
// Exchanges are counted from 1, and after 2^32 - 1 comes 1 again: peer buffers start as zeros,
// which belong to no exchange. Three divides 2^32 - 1, so that the rotation of the copies
// continues.
//
// A rank starts epoch e + 2 only after it has e + 1 of every peer. A peer sends that only when its
// kernel of epoch e has ended, with the words of e reset to 0. Two copies would be enough if every
// kernel ended before the next one begins. The third is for a kernel that starts while the one
// before it ends.
#pragma once

#include <cstdint>

#include "kernels/exchange.hpp"

namespace longspan::kernels::cuda {

inline constexpr std::uint32_t kCopies = 3;
static_assert(~std::uint32_t{0} % kCopies == 0);

LONGSPAN_HD inline std::uint32_t next_epoch(std::uint32_t epoch) {
  return epoch == ~std::uint32_t{0} ? 1 : epoch + 1;
}
LONGSPAN_HD inline std::uint32_t copy_of(std::uint32_t epoch) { return epoch % kCopies; }

/// The start of a rank's own peer buffer, for its threads that wait long (BoundedWait).
struct Watch {
  std::uint32_t stopped;  // not 0 if there is a report; every wait then ends
  std::uint32_t turns;    // polls so far; it never stops counting
  std::uint64_t began;    // when a wait first became long, above the epoch that it was in
};

struct PeerBufferLayout {
  std::int64_t rows;  // capacity
  int dim;            // of a row of states, padded
  int ranks;

  static LONGSPAN_HD std::int64_t round_up(std::int64_t bytes) { return (bytes + 127) / 128 * 128; }

  LONGSPAN_HD std::int64_t copy(std::uint32_t index) const {
    return round_up(sizeof(Watch)) + index * copy_bytes();
  }

  // The offsets within a copy:

  // [ranks] header lines, one from each rank, with the epoch twice
  LONGSPAN_HD static std::int64_t header(int rank) { return rank * std::int64_t{16}; }
  // [ranks] slots, with the layout of each in its rank's own memory, for as many rows as the
  // exchange has; their words are 0 except while they are in flight
  LONGSPAN_HD std::int64_t slot(int rank) const {
    return header(PeerView::kMostRanks) + rank * round_up(StateSlots::bytes(rows, dim));
  }
  // out [rows, dim] in the result's type, then lse [rows], in words of the same kind
  LONGSPAN_HD std::int64_t result() const { return slot(ranks); }
  LONGSPAN_HD std::int64_t lse() const { return result() + rows * dim * 4; }
  LONGSPAN_HD std::int64_t copy_bytes() const { return round_up(lse() + rows * 4); }

  LONGSPAN_HD std::int64_t total() const { return copy(kCopies); }
};

}  // namespace longspan::kernels::cuda
