// Rows that a rank puts into the memory of all ranks with a kernel, while attentions wait for them
// (KeyArrivals): keys and values, and queries too.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/digest.hpp"
#include "kernels/key_arrivals.hpp"
#include "longspan/types.hpp"
#include "src/base/put_flags.hpp"
#include "src/base/strided_copy.hpp"

namespace longspan::kernels {

/// The puts of a rank: to every other rank the rows that it needs, and to itself the rows that its
/// attention reads there. They go in pieces, one after another; after each piece it increments a
/// counter at every rank. Nothing is put before every rank has room for it.
struct RowPuts {
  /// Some heads (neighbouring columns) of neighbouring rows, in parts of some heads each.
  struct Block {
    StridedCopy copy;             // of all parts together
    std::int64_t part_width = 0;  // bytes of a row; the last part may have less
    int every = 1;                // part i goes with piece i * every

    /// The bytes of a row in a piece, from piece / every * part_width on; 0 or less: none.
    LONGSPAN_HD std::int64_t width_of(int piece) const {
      if (piece % every != 0) return 0;
      const std::int64_t rest = copy.width - piece / every * part_width;
      return rest < part_width ? rest : part_width;
    }
  };
  static constexpr int kMostBlocks = 104;
  static constexpr int kMostPieces = KeyArrivals::kMostPieces;

  Block block[kMostBlocks] = {};
  int blocks = 0;
  int pieces = 0;
  // Whether the attention queued next runs beside it (KeyArrivals). If not, all data for this rank
  // has arrived when it ends.
  bool beside = false;
  std::int64_t rows_a_unit = 1;  // that a warp copies at a time
  std::int64_t units = 0;        // of a piece: unit u is part u / blocks of the block u % blocks

  PutRanks among;
  RunDigestParams digest;  // this rank's, of the run (RunHeaders); with `to` null none
  std::uint64_t* digests[PeerView::kMostRanks] = {};  // its address on each rank, this one included
  unsigned* done = nullptr;  // [kMostPieces] warps that are done with a piece; 0 between runs

  /// Adds a copy that is split into parts of `part_width` bytes of a row.
  void add(const StridedCopy& copy, std::int64_t part_width, int every = 1);
  /// Divides the blocks into units, once all are added.
  void divide();
};

}  // namespace longspan::kernels
