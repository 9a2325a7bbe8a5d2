/// \file
/// Which keys of a sequence a rank holds, and their positions in the sequence. A shard is a
/// property of the data, not of a strategy. It is a rule (kind, rank, ranks), so it holds for each
/// sequence of a batch and for lengths that change from run to run. `ranges` and `listed` use a
/// table instead: `ranges` one row for each sequence, `listed` one sequence.
///
/// `Sharding` is the rule alone, which is the same on all ranks when a layer is made; `Shard` is
/// the rule applied to one rank.
#pragma once

#include <cstdint>
#include <string>

#include "longspan/error.hpp"
#include "longspan/order.hpp"
#include "longspan/types.hpp"

namespace longspan {

/// The rules by which P ranks share n positions of a sequence.
enum class Layout : std::uint8_t {
  contiguous,   ///< rank r holds segments [n r / P, n (r+1) / P) of 128 keys: even to one segment
  ranges,       ///< rank r holds positions [table[r], table[r+1])
  zigzag,       ///< 2 P chunks; rank r holds chunks r and 2 P - 1 - r (even work under causal)
  striped,      ///< rank r holds positions r, r + P, r + 2 P ...
  interleaved,  ///< blocks of `block` keys go to the ranks in turn; even for a cache that grows
  listed,       ///< the rank's local key i has position table[i]
};

/// "zigzag", and so on; "no layout" for an invalid number.
constexpr const char* name(Layout layout) {
  constexpr const char* names[] = {"contiguous", "ranges",      "zigzag",
                                   "striped",    "interleaved", "listed"};
  return layout <= Layout::listed ? names[static_cast<int>(layout)] : "no layout";
}

/// The part of a sequence that one rank holds. `checked`, and the functions that use it, refuse
/// invalid shards. The other functions check nothing, since kernels call them.
struct Shard {
  Layout layout = Layout::contiguous;  ///< the rule
  int rank = 0;                        ///< this rank, 0 to ranks - 1
  int ranks = 1;                       ///< ranks that share the sequence, 1 to 2^20
  std::int64_t length = 0;        ///< keys of the whole sequence; AttentionArgs::kv_len for a batch
  std::int64_t block = kSegment;  ///< interleaved: keys in a block
  const std::int64_t* table = nullptr;  ///< ranges: [batch, ranks + 1]; listed: [listed]; on the
                                        ///< device that computes
  std::int64_t listed = 0;              ///< listed: keys on this rank

  /// A shard of that layout. Like all of these, it throws InputError for a rank outside of 0 to
  /// ranks - 1, a negative length or count, and a block without keys.
  static Shard contiguous(std::int64_t length, int rank, int ranks) {
    return checked({Layout::contiguous, rank, ranks, length});
  }
  /// A shard of that layout.
  static Shard zigzag(std::int64_t length, int rank, int ranks) {
    return checked({Layout::zigzag, rank, ranks, length});
  }
  /// A shard of that layout.
  static Shard striped(std::int64_t length, int rank, int ranks) {
    return checked({Layout::striped, rank, ranks, length});
  }
  /// A shard of that layout; `block` in keys.
  static Shard interleaved(std::int64_t length, int rank, int ranks,
                           std::int64_t block = kSegment) {
    return checked({Layout::interleaved, rank, ranks, length, block});
  }
  /// Positions [table[r], table[r+1]) on rank r; table [ranks + 1] ascends from 0 to length. In a
  /// batch each sequence has its own row: table [batch, ranks + 1].
  static Shard ranges(std::int64_t length, int rank, int ranks, const std::int64_t* table) {
    return checked({Layout::ranges, rank, ranks, length, kSegment, table});
  }
  /// Any positions in any order: local key i has position positions[i] (device memory on CUDA).
  static Shard at_positions(std::int64_t length, int rank, int ranks, const std::int64_t* positions,
                            std::int64_t count) {
    return checked({Layout::listed, rank, ranks, length, kSegment, positions, count});
  }

  /// Checks a shard before use and returns it. InputError names what is wrong.
  static Shard checked(const Shard& shard) {
    const auto refuse = [](bool holds, const char* what, std::int64_t found, const char* wanted) {
      if (!holds)
        throw InputError(std::string("a shard has ") + what + " " + std::to_string(found) + "; " +
                         wanted);
    };
    refuse(shard.layout <= Layout::listed, "a layout of number", static_cast<int>(shard.layout),
           "see Layout");
    refuse(shard.ranks >= 1 && shard.ranks <= 1 << 20, "ranks", shard.ranks, "they are 1 to 2^20");
    refuse(shard.rank >= 0 && shard.rank < shard.ranks, "rank", shard.rank,
           "it is at least 0 and below the number of ranks");
    constexpr std::int64_t kMost = std::int64_t{1} << 41;  // so that no product exceeds 63 bits
    refuse(shard.length >= 0 && shard.length <= kMost, "length", shard.length, "it is 0 to 2^41");
    refuse(shard.block >= 1 && shard.block <= kMost, "block", shard.block, "it is 1 to 2^41");
    refuse(shard.listed >= 0, "a count of listed keys of", shard.listed, "it is at least 0");
    return shard;
  }

  /// The same rule for another rank. Not for `listed`, whose table is one rank's own.
  LONGSPAN_HD Shard with_rank(int other) const {
    Shard shard = *this;
    shard.rank = other;
    return shard;
  }

  /// The rule for sequence b of a batch.
  LONGSPAN_HD Shard for_sequence(int b) const {
    Shard shard = *this;
    if (layout == Layout::ranges) shard.table += static_cast<std::int64_t>(b) * (ranks + 1);
    return shard;
  }

  /// The number of keys that this rank holds of a sequence of `kv_len` keys.
  LONGSPAN_HD std::int64_t local_len(std::int64_t kv_len) const {
    return holds_all() ? kv_len : share(*this, kv_len);
  }

  /// Position in the sequence of local key i. Ascends with i, except in `listed`.
  LONGSPAN_HD std::int64_t position(std::int64_t i, std::int64_t kv_len) const {
    switch (layout) {
      case Layout::contiguous:
        return start(rank, kv_len) + i;
      case Layout::ranges:
        return table[rank] + i;
      case Layout::zigzag: {
        const std::int64_t first = chunk(rank, kv_len);
        const std::int64_t size = chunk(rank + 1, kv_len) - first;
        return i < size ? first + i : chunk(2 * ranks - 1 - rank, kv_len) + i - size;
      }
      case Layout::striped:
        return rank + i * ranks;
      case Layout::interleaved:
        return (i / block * ranks + rank) * block + i % block;
      default:
        return table[i];
    }
  }

  /// The number of local keys below `position`. If positions ascend, the keys of an interval of
  /// positions are the local keys [before(begin), before(end)). Not for `listed`.
  LONGSPAN_HD std::int64_t before(std::int64_t position, std::int64_t kv_len) const {
    if (position <= 0) return 0;
    if (position > kv_len) position = kv_len;
    return holds_all() ? position : share_before(*this, position, kv_len);
  }

  /// Whether this rank holds the key at `position`, as local key before(position). Not for
  /// `listed`.
  LONGSPAN_HD bool owns(std::int64_t position, std::int64_t kv_len) const {
    return position >= 0 && position < kv_len &&
           before(position + 1, kv_len) > before(position, kv_len);
  }

  /// Whether the local keys of a segment, [128 s, 128 s + 128), have consecutive positions.
  LONGSPAN_HD bool consecutive_in_segment() const {
    return ranks == 1 ? layout != Layout::listed
                      : layout == Layout::contiguous || layout == Layout::ranges ||
                            (layout == Layout::interleaved && block % kSegment == 0);
  }

  /// The most keys that any rank holds: the size of an equal slot for each rank.
  std::int64_t max_local_len(std::int64_t kv_len) const {
    checked(*this);
    std::int64_t most = 0;
    for (int r = 0; r < ranks; ++r) {
      const std::int64_t len = with_rank(r).local_len(kv_len);
      if (len > most) most = len;
    }
    return most;
  }

  /// True where the cut between ranks is a cut of the fixed order's tree (order.hpp), so that the
  /// result has the same bits for every such number of ranks.
  LONGSPAN_HD bool keeps_order() const {
    const bool cut_at_segments =
        layout == Layout::contiguous || (layout == Layout::interleaved && block % kSegment == 0);
    return ranks == 1 ? layout != Layout::listed && layout != Layout::ranges
                      : cut_at_segments && kVirtualRanks % ranks == 0;
  }

  /// How this rank folds its segments of a sequence of `kv_len` keys.
  LONGSPAN_HD SegmentOrder order(std::int64_t kv_len) const {
    const std::int64_t own = segments_of(local_len(kv_len));
    const bool aligned = keeps_order();
    const int leaves = aligned ? kVirtualRanks / ranks : kVirtualRanks;
    if (layout == Layout::interleaved && block % kSegment == 0)
      return {true, leaves, 0, own, block / kSegment};
    if (layout == Layout::contiguous && aligned)
      return {false, leaves, rank * leaves, segments_of(kv_len), 1};
    return {false, kVirtualRanks, 0, own, 1};  // exact, and the same bits from run to run
  }

 private:
  /// One rank that holds everything by a rule. It needs no division to find its keys, which on a
  /// GPU is the start of each work tile.
  LONGSPAN_HD bool holds_all() const {
    return ranks == 1 && layout != Layout::ranges && layout != Layout::listed;
  }
  /// local_len and before if several ranks share the keys, or a table distributes them.
  LONGSPAN_HD_APART static std::int64_t share(Shard s, std::int64_t kv_len) {
    switch (s.layout) {
      case Layout::contiguous:
        return s.start(s.rank + 1, kv_len) - s.start(s.rank, kv_len);
      case Layout::ranges:
        return s.table[s.rank + 1] - s.table[s.rank];
      case Layout::zigzag:
        return s.chunk(s.rank + 1, kv_len) - s.chunk(s.rank, kv_len) +
               s.chunk(2 * s.ranks - s.rank, kv_len) - s.chunk(2 * s.ranks - 1 - s.rank, kv_len);
      case Layout::striped:
        return kv_len > s.rank ? (kv_len - s.rank + s.ranks - 1) / s.ranks : 0;
      case Layout::interleaved: {
        const std::int64_t round = s.block * s.ranks;
        const std::int64_t remainder = kv_len % round - s.rank * s.block;
        return kv_len / round * s.block + (remainder < 0         ? 0
                                           : remainder < s.block ? remainder
                                                                 : s.block);
      }
      default:
        return s.listed;
    }
  }
  LONGSPAN_HD_APART static std::int64_t share_before(Shard s, std::int64_t position,
                                                     std::int64_t kv_len) {
    switch (s.layout) {
      case Layout::contiguous:
        return within(position - s.start(s.rank, kv_len), share(s, kv_len));
      case Layout::ranges:
        return within(position - s.table[s.rank], share(s, kv_len));
      case Layout::zigzag: {
        const std::int64_t low = s.chunk(s.rank, kv_len);
        const std::int64_t high = s.chunk(2 * s.ranks - 1 - s.rank, kv_len);
        return within(position - low, s.chunk(s.rank + 1, kv_len) - low) +
               within(position - high, s.chunk(2 * s.ranks - s.rank, kv_len) - high);
      }
      default:
        return share(s, position);
    }
  }
  LONGSPAN_HD static std::int64_t within(std::int64_t n, std::int64_t most) {
    return n < 0 ? 0 : n < most ? n : most;
  }
  LONGSPAN_HD std::int64_t start(std::int64_t r, std::int64_t kv_len) const {
    const std::int64_t key = even_cut(segments_of(kv_len), r, ranks) * kSegment;
    return key < kv_len ? key : kv_len;
  }
  LONGSPAN_HD std::int64_t chunk(std::int64_t c, std::int64_t kv_len) const {
    // Kernels run this. There are at most 2^20 ranks, so 32 bits are enough.
    // NOLINTNEXTLINE(bugprone-implicit-widening-of-multiplication-result)
    return even_cut(kv_len, c, 2 * ranks);
  }
};

/// How a sequence is distributed over the ranks: a rule without a rank.
struct Sharding {
  Layout layout = Layout::contiguous;  ///< the rule
  std::int64_t block = kSegment;       ///< interleaved: keys in a block

  /// Whether all members are equal.
  bool operator==(const Sharding&) const = default;

  /// The part that rank `rank` of `ranks` holds of a sequence of `length` positions. `ranges` and
  /// `listed` need a table, as in Shard; `listed` is the number of its entries. InputError as
  /// Shard::checked.
  Shard resolve(std::int64_t length, int rank, int ranks, const std::int64_t* table = nullptr,
                std::int64_t listed = 0) const {
    return Shard::checked({layout, rank, ranks, length, block, table, listed});
  }
};

}  // namespace longspan
