// Where the parts of an exchange window lie.
//
// Two copies of every buffer, by the parity of the epoch, are enough: a rank starts epoch e + 2
// only after it has e + 1 of every peer, which a peer sends only when its kernel of epoch e has
// ended.
#pragma once

#include <cstdint>

#include "kernels/exchange.hpp"

namespace longspan::kernels::cuda {

inline constexpr int kMostBlocks = 256;
inline constexpr std::int64_t kMostBesideRows = 4096;  // of the variant `beside`
inline constexpr std::uint32_t kMagic = 0x6c6f6e67u;

struct WindowLayout {
  std::int64_t rows;  // capacity
  int dim;
  int ranks;

  static LONGSPAN_HD std::int64_t round_up(std::int64_t bytes) { return (bytes + 127) / 128 * 128; }

  // [2 stages][ranks][kMostBlocks] flags: the last epoch whose data is there
  LONGSPAN_HD std::int64_t flag(int stage, int rank, int block) const {
    return ((stage * PeerView::kMostRanks + rank) * std::int64_t{kMostBlocks} + block) * 4;
  }
  // [2 parities][ranks] a line: what the rank exchanges, and the epoch twice
  LONGSPAN_HD std::int64_t header(unsigned parity, int rank) const {
    return flag(2, 0, 0) + (parity * PeerView::kMostRanks + rank) * std::int64_t{16};
  }
  // [2 parities][ranks][rows] a line of statistics, then dim / 2 lines of two elements
  LONGSPAN_HD std::int64_t beside_row() const { return 16 + dim * std::int64_t{8}; }
  LONGSPAN_HD std::int64_t beside_rows() const {
    return rows < kMostBesideRows ? rows : kMostBesideRows;
  }
  LONGSPAN_HD std::int64_t beside(unsigned parity, int rank) const {
    return header(2, 0) + (parity * ranks + rank) * round_up(beside_rows() * beside_row());
  }
  // [2 parities][ranks] statistics [rows], then o [rows, dim]
  LONGSPAN_HD std::int64_t slot_bytes() const { return round_up(StateSlots::bytes(rows, dim)); }
  LONGSPAN_HD std::int64_t slot(unsigned parity, int rank) const {
    return beside(2, 0) + (parity * ranks + rank) * slot_bytes();
  }
  // [2 parities] out [rows, dim] in the result's type, then lse [rows]
  LONGSPAN_HD std::int64_t result_bytes() const { return round_up(rows * (dim + 1) * 4); }
  LONGSPAN_HD std::int64_t result(unsigned parity) const {
    return slot(2, 0) + parity * result_bytes();
  }
  LONGSPAN_HD std::int64_t total() const { return result(2); }
};

}  // namespace longspan::kernels::cuda
