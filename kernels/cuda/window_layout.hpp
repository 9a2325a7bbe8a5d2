// Where the parts of an exchange window lie: flags, then copies of everything else, one for each of
// the exchanges that may be on their way at once.
//
// Exchanges are counted from 1, and after 2^32 - 1 comes 1 again: windows are made of zeros, which
// are no exchange's, and three divides 2^32 - 1, so that the copies go on in turn.
//
// A rank starts epoch e + 2 only after it has e + 1 of every peer, which a peer sends only when its
// kernel of epoch e has ended. So two copies would do, were it certain that a kernel is over before
// the next one begins. Three leave room for a kernel that starts while the one before it ends.
#pragma once

#include <cstdint>

#include "kernels/exchange.hpp"

namespace longspan::kernels::cuda {

inline constexpr int kMostBlocks = 512;
inline constexpr std::int64_t kMostBesideRows = 4096;  // of the variant `beside`
inline constexpr std::uint32_t kCopies = 3;
static_assert(~std::uint32_t{0} % kCopies == 0);

LONGSPAN_HD inline std::uint32_t next_epoch(std::uint32_t epoch) {
  return epoch == ~std::uint32_t{0} ? 1 : epoch + 1;
}
LONGSPAN_HD inline std::uint32_t copy_of(std::uint32_t epoch) { return epoch % kCopies; }
/// Whether a flag says that data of an exchange is there. Nobody is further ahead than by one.
LONGSPAN_HD inline bool is_reached(std::uint32_t flag, std::uint32_t epoch) {
  return flag == epoch || flag == next_epoch(epoch);
}

struct WindowLayout {
  std::int64_t rows;  // capacity
  int dim;
  int ranks;

  static LONGSPAN_HD std::int64_t round_up(std::int64_t bytes) { return (bytes + 127) / 128 * 128; }

  // [2 stages][ranks][kMostBlocks] flags: the last epoch whose data is there
  LONGSPAN_HD static std::int64_t flag(int stage, int rank, int block) {
    return ((stage * PeerView::kMostRanks + rank) * std::int64_t{kMostBlocks} + block) * 4;
  }
  LONGSPAN_HD std::int64_t copy(std::uint32_t index) const {
    return flag(2, 0, 0) + index * copy_bytes();
  }

  // In a copy:

  // [ranks] a line: what the rank exchanges, and the epoch twice
  LONGSPAN_HD static std::int64_t header(int rank) { return rank * std::int64_t{16}; }
  // [ranks][rows] a line of statistics, then dim / 2 lines of two elements
  LONGSPAN_HD std::int64_t beside_row() const { return 16 + dim * std::int64_t{8}; }
  LONGSPAN_HD std::int64_t beside_rows() const {
    return rows < kMostBesideRows ? rows : kMostBesideRows;
  }
  LONGSPAN_HD std::int64_t beside(int rank) const {
    return header(PeerView::kMostRanks) + rank * round_up(beside_rows() * beside_row());
  }
  // [ranks] the rank's slot as it is in its own memory, for as many rows as the exchange has
  LONGSPAN_HD std::int64_t slot(int rank) const {
    return beside(ranks) + rank * round_up(StateSlots::bytes(rows, dim));
  }
  // out [rows, dim] in the result's type, then lse [rows]
  LONGSPAN_HD std::int64_t result() const { return slot(ranks); }
  // The same again, all 0 but for words that are on their way
  LONGSPAN_HD std::int64_t words(int rank) const {
    return result() + result_bytes() + slot(rank) - slot(0);
  }
  LONGSPAN_HD std::int64_t words_result() const { return words(ranks); }
  LONGSPAN_HD std::int64_t copy_bytes() const { return words_result() + result_bytes(); }

  LONGSPAN_HD std::int64_t total() const { return copy(kCopies); }

 private:
  LONGSPAN_HD std::int64_t result_bytes() const { return round_up(rows * (dim + 1) * 4); }
};

}  // namespace longspan::kernels::cuda
