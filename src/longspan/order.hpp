/// \file
/// The fixed order: why 1, 2, 4 ... 64 ranks give the same bits.
///
/// A segment is 128 keys that start at a multiple of 128 of their own sequence's positions. The n
/// segments of a sequence belong to 64 virtual ranks, however many real ranks there are:
///
///     contiguous                   v owns [n v / 64, n (v+1) / 64), rounded down
///     interleaved by u segments    v owns each segment i with (i / u) mod 64 = v
///
/// A segment is folded in one fixed shape. The segments of a virtual rank fold as a binary tree
/// over their local index, padded to a power of two. The 64 states fold in six rounds (contiguous:
/// distance 1, 2 ... 32; interleaved: 32, 16 ... 1). Empty operands are skipped by selection, so
/// missing leaves do not change the bits. If the number of ranks divides 64, ranks own whole
/// subtrees, so a cut between ranks is a cut between nodes of the same tree.
///
/// Seen from one rank: its virtual ranks, numbered in fold order, are `leaves`. Leaf j of the rank
/// folds with leaf j^1 first in both layouts. (An interleaved rank's virtual ranks are numbered in
/// bit-reversed order, which turns distances 32, 16 ... into neighbours first.)
#pragma once

#include <cstdint>

#include "longspan/types.hpp"

namespace longspan {

inline constexpr int kSegment = 128;      ///< keys
inline constexpr int kVirtualRanks = 64;  ///< whatever the number of real ranks

/// `value` with its low `bits` bits in reverse order.
LONGSPAN_HD constexpr int reverse_bits(int value, int bits) {
#if defined(__CUDA_ARCH__)
  if (!__builtin_is_constant_evaluated())
    return bits == 0 ? 0 : static_cast<int>(__brev(static_cast<unsigned>(value)) >> (32 - bits));
#endif
  int reversed = 0;
  for (int b = 0; b < bits; ++b) reversed |= ((value >> b) & 1) << (bits - 1 - b);
  return reversed;
}

/// The least b with 2^b >= n; 0 for n of at most 1.
LONGSPAN_HD constexpr int log2_ceil(int n) {
#if defined(__CUDA_ARCH__)
  if (!__builtin_is_constant_evaluated()) return n <= 1 ? 0 : 32 - __clz(n - 1);
#endif
  int bits = 0;
  while ((1 << bits) < n) ++bits;
  return bits;
}

/// Segments of `keys` keys; the last one may be partial.
LONGSPAN_HD constexpr std::int64_t segments_of(std::int64_t keys) {
  return (keys + kSegment - 1) / kSegment;
}

/// The first of the n segments that virtual rank v of `ranks` owns in the contiguous layout.
LONGSPAN_HD constexpr std::int64_t even_cut(std::int64_t n, std::int64_t v, std::int64_t ranks) {
  return n * v / ranks;
}

/// The part of the tree that one rank folds: which of its local segments each leaf owns. Local
/// segment s is the local keys [128 s, 128 (s+1)), clipped to the rank's number of keys.
struct SegmentOrder {
  bool interleaved = false;    ///< the layout
  int leaves = kVirtualRanks;  ///< virtual ranks on this rank; a power of two
  int first = 0;               ///< contiguous: the first of them
  std::int64_t total = 0;      ///< segments in the sequence; interleaved: on this rank
  std::int64_t unit = 1;       ///< interleaved: segments in a block

  /// Number of segments in leaf j.
  LONGSPAN_HD std::int64_t count(int j) const {
    if (!interleaved) return begin(j + 1) - begin(j);
    const std::int64_t v = reverse_bits(j, log2_ceil(leaves));
    const std::int64_t round = unit * leaves;
    const std::int64_t remainder = total % round - v * unit;
    return total / round * unit + (remainder < 0 ? 0 : remainder < unit ? remainder : unit);
  }

  /// Local index of the t-th segment of leaf j; t is also its index in the leaf's binary tree.
  LONGSPAN_HD std::int64_t segment(int j, std::int64_t t) const {
    if (!interleaved) return begin(j) + t;
    const std::int64_t v = reverse_bits(j, log2_ceil(leaves));
    return (t / unit * leaves + v) * unit + t % unit;
  }

  /// Contiguous: local index of the first segment of leaf j.
  LONGSPAN_HD std::int64_t begin(int j) const {
    return even_cut(total, first + j, kVirtualRanks) - even_cut(total, first, kVirtualRanks);
  }
};

/// Index of rank `rank` in the fold of `ranks` gathered states, which always merges neighbours
/// first, padded to a power of two with empty states.
LONGSPAN_HD constexpr int fold_place(int rank, int ranks, bool interleaved) {
  return interleaved ? reverse_bits(rank, log2_ceil(ranks)) : rank;
}

}  // namespace longspan
