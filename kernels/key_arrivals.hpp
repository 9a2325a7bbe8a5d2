// Keys and values, and queries too, that other ranks are still sending while an attention with them
// already runs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/tensors.hpp"
#include "src/base/put_flags.hpp"

namespace longspan::kernels {

/// The keys of one whole sequence. This rank's own keys stay in place; those of the others arrive
/// in AttendParams::k and v, in pieces of neighbouring heads (RowPuts). The kernel waits for a
/// rank's piece before it reads keys of it.
///
/// In k and v the places of own keys need not be written, except for the kMargin keys at each end
/// of a stretch of them: a tile may have both own keys and those of others. These ends arrive like
/// the keys of others.
///
/// Queries, for all rows of the sequence, arrive in the same way in AttendParams::q, own ones too.
struct KeyArrivals {
  /// Neighbouring keys, or queries, of one rank.
  struct Portion {
    int begin;  // position of the first; they end where the portion before this one begins
    int place;  // for own keys the row of the first in k and v below; for own queries any number
                // that is not negative; for those of others ~their rank

    LONGSPAN_HD bool is_own() const { return place >= 0; }
    LONGSPAN_HD int rank() const { return ~place; }
  };
  static constexpr int kMostPieces = 8;  // of a rank
  static_assert(kMostPieces + 1 < PutFlags::kRun);
  static constexpr int kMostPortions = 32;  // of all ranks
  static constexpr int kMargin = 192;       // no kernel has larger tiles of keys
  static constexpr int kLeastRows = 17;     // kernels for fewer query rows do not wait

  const PutFlags* flags = nullptr;  // of this rank: how much of each rank's data has arrived
  bool behind_puts = false;  // this rank's put_rows is the last kernel on the stream: both run at
                             // once
  int rank = 0;
  int ranks = 1;
  int heads_a_piece =
      1;  // query heads; the kv heads that they are the first to read come with them

  KvRows k, v;  // the own keys, [keys on this rank, kv_heads, head_dim], and their values
  Portion portion[kMostPortions] = {};  // of the whole sequence, from its last key to its first
  int portions = 0;
  Portion query_portion[kMostPortions] = {};  // the same for the queries
  int query_portions = 0;                     // 0: all queries have arrived

  LONGSPAN_HD explicit operator bool() const { return flags != nullptr; }
  /// The increment of PutFlags::here after which the piece of a rank with a query head, and the kv
  /// head that it reads, has arrived. Pieces arrive in order.
  LONGSPAN_HD int count_of(int head) const { return 2 + head / heads_a_piece; }
};

}  // namespace longspan::kernels
