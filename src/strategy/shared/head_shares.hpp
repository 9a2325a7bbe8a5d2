// The heads with which each rank attends, if ranks share the work by heads: some query heads, and
// the kv heads that these read; and the pieces in which heads arrive.
#pragma once

#include <algorithm>

#include "longspan/options.hpp"
#include "src/base/divided_up.hpp"

namespace longspan {

/// A rank's heads. The groups are even on the rank too: each of its kv heads has the same number of
/// its query heads.
struct HeadShare {
  HeadRange query;
  HeadRange kv;
};

/// Distributes `heads`, at least as many as ranks. With enough kv heads, each rank gets whole
/// groups. Otherwise the ranks are distributed over the kv heads; the ranks of one kv head share
/// its group, and each has a copy of it. Either is as even as possible.
constexpr HeadShare head_share(int heads, int kv_heads, int rank, int ranks) {
  const int group = heads / kv_heads;
  if (kv_heads >= ranks) {
    const HeadRange kv = result_heads(kv_heads, rank, ranks);
    return {{kv.begin * group, kv.end * group}, kv};
  }
  const auto kv = static_cast<int>(((std::int64_t{rank} + 1) * kv_heads - 1) / ranks);
  const HeadRange sharing = result_heads(ranks, kv, kv_heads);  // ranks that share this kv head
  const HeadRange part = result_heads(group, rank - sharing.begin, sharing.size());
  return {{kv * group + part.begin, kv * group + part.end}, {kv, kv + 1}};
}

/// The most heads that a rank has of either kind.
struct MostHeads {
  int query = 0;
  int kv = 0;
};
constexpr MostHeads most_heads(int heads, int kv_heads, int ranks) {
  MostHeads most;
  for (int rank = 0; rank < ranks; ++rank) {
    const HeadShare share = head_share(heads, kv_heads, rank, ranks);
    if (share.query.size() > most.query) most.query = share.query.size();
    if (share.kv.size() > most.kv) most.kv = share.kv.size();
  }
  return most;
}

/// The pieces in which a rank's heads arrive, one after another.
struct HeadPieces {
  int group;  // query heads that read one kv head
  int size;   // query heads in a piece
  int count;  // of the rank that gets the most

  /// Divides up to `most` query heads of a rank into at most `pieces` pieces, of whole groups or of
  /// equal parts of one; `whole_groups` keeps groups together.
  constexpr HeadPieces(int most, int of_group, int pieces, bool whole_groups) : group(of_group) {
    size = static_cast<int>(divided_up(most, pieces));
    if (whole_groups || size > group) size = static_cast<int>(divided_up(size, group)) * group;
    while (size < group && group % size != 0) ++size;
    count = static_cast<int>(divided_up(most, size));
  }

  /// The heads of a share that arrive in the piece: some query heads, and the kv heads that these
  /// are the first to read.
  constexpr HeadShare of(const HeadShare& share, int piece) const {
    const HeadRange query{std::min(share.query.begin + piece * size, share.query.end),
                          std::min(share.query.begin + (piece + 1) * size, share.query.end)};
    const auto kv = [&](int head) {
      return head == share.query.begin ? share.kv.begin : static_cast<int>(divided_up(head, group));
    };
    return {query, {kv(query.begin), kv(query.end)}};
  }
};

/// Whether every rank attends with the same heads that results by heads give it.
constexpr bool are_result_heads(int heads, int kv_heads, int ranks) {
  for (int rank = 0; rank < ranks; ++rank)
    if (head_share(heads, kv_heads, rank, ranks).query.end != result_heads(heads, rank, ranks).end)
      return false;
  return true;
}

}  // namespace longspan
