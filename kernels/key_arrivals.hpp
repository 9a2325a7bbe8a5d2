// Keys and values, and queries too, that other ranks still send while an attention with them
// already runs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/tensors.hpp"
#include "src/base/put_flags.hpp"

namespace longspan::kernels {

/// The keys of one whole sequence, of which this rank's own lie where they are and those of the
/// others come to AttendParams::k and v, in pieces of neighbouring heads (RowPuts). The kernel
/// waits for a rank's piece before it reads keys of it.
///
/// Where k and v have the own keys is memory that need not be written, but for the kMargin keys at
/// each end of a stretch of them, as a tile may have both own keys and those of others: they come
/// as those of the others do.
///
/// Queries, for all rows of the sequence, come likewise to AttendParams::q, own ones too.
struct KeyArrivals {
  /// Neighbouring keys, or queries, of one rank.
  struct Portion {
    int begin;  // position of the first; they end where the portion before this one begins
    int place;  // of own keys the row of the first in k and v below, of own queries any number that
                // is not negative; of those of others ~their rank

    LONGSPAN_HD bool is_own() const { return place >= 0; }
    LONGSPAN_HD int rank() const { return ~place; }
  };
  static constexpr int kMostPieces = 8;  // of a rank
  static_assert(kMostPieces + 1 < PutFlags::kRun);
  static constexpr int kMostPortions = 32;  // of all ranks
  static constexpr int kMargin = 192;       // no kernel has larger tiles of keys
  static constexpr int kLeastRows = 17;     // kernels for fewer query rows do not wait

  const PutFlags* flags = nullptr;  // of this rank: how much of each rank is here
  bool behind_puts = false;  // this rank's put_rows is what the stream has last: both run at once
  int rank = 0;
  int ranks = 1;
  int heads_a_piece =
      1;  // query heads; the kv heads that they are the first to read come with them

  KvRows k, v;  // the own keys, [keys on this rank, kv_heads, head_dim], and their values
  Portion portion[kMostPortions] = {};  // of the whole sequence, from its last key to its first
  int portions = 0;
  Portion query_portion[kMostPortions] = {};  // likewise of the queries
  int query_portions = 0;                     // 0: all queries are here

  LONGSPAN_HD explicit operator bool() const { return flags != nullptr; }
  /// What PutFlags::here has grown by once the piece of a rank is here that a query head, and the
  /// kv head that it reads, are in. Pieces come in order.
  LONGSPAN_HD int count_of(int head) const { return 2 + head / heads_a_piece; }
};

}  // namespace longspan::kernels
