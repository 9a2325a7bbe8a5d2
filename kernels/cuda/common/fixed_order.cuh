// The fixed order (longspan/order.hpp) on the device. A walk yields the segments of a work tile in
// the order of the tree's leaves, and a stack of states folds them.
//
// A segment's index in the tree is leaf << bits | t, where 2^bits >= the segments of any leaf: the
// trees of the leaves and the tree over the leaves are then one binary tree. Segments that no row
// sees are left out. Between index p and index i > p, with k = the highest bit of p ^ i, the
// subtree of 2^k indices around p is complete: its states fold, the newest first, and the result
// waits on level k for its sibling. Missing indices therefore do not change the bits.
#pragma once

#include <cstdint>

#include "kernels/cuda/arch/bits.cuh"
#include "kernels/params.hpp"
#include "longspan/order.hpp"
#include "longspan/state.hpp"

namespace longspan::kernels::cuda {

/// The most segments of a leaf. It is computed in 32 bits, because 64-bit divisions are slow.
LONGSPAN_HD inline int most_of_leaf(const SegmentOrder& order) {
  const unsigned total = static_cast<unsigned>(order.total);
  if (!order.interleaved) return static_cast<int>((total + kVirtualRanks - 1) / kVirtualRanks);
  const unsigned unit = static_cast<unsigned>(order.unit);
  const unsigned round = unit * static_cast<unsigned>(order.leaves), remainder = total % round;
  return static_cast<int>(total / round * unit + (remainder < unit ? remainder : unit));
}

/// The number of low index bits inside a leaf.
LONGSPAN_HD inline int leaf_bits(const SegmentOrder& order) {
  return log2_ceil(most_of_leaf(order));
}

/// Walks over the visible segments of one split, in the order of their indices. On a GPU this runs
/// before the first key of a work tile is read, so it uses few instructions: the bounds of a leaf
/// are computed once, when it is entered, steps inside it add one, and segments and indices are
/// counted in 32 bits (2^38 keys).
class SegmentWalk {
 public:
  std::int64_t place;    // in the tree
  std::int64_t segment;  // local

  SegmentWalk() = default;

  /// Walks over part `split` of `splits` of the tree. `any` are the local keys that some row sees.
  LONGSPAN_HD SegmentWalk(const SegmentOrder& order, const Interval& any, int split, int splits)
      : order_(order), bits_(leaf_bits(order)) {
    const std::int64_t size = static_cast<std::int64_t>(order.leaves) << bits_;
    const int shift = log2_ceil(splits);  // a power of two
    next_ = static_cast<int>(size * split >> shift);
    end_ = any.empty() ? next_ : static_cast<int>(size * (split + 1) >> shift);
    leaf_end_ = next_;
    low_ = static_cast<int>(any.begin / kSegment);
    high_ = static_cast<int>(segments_of(any.end));
    unit_ = static_cast<int>(order.unit);
    low_rounds_ = high_rounds_ = 0;
    if (order.interleaved) {
      const int round = unit_ * order.leaves;
      low_rounds_ = low_ / round * unit_;
      low_ %= round;
      high_rounds_ = high_ / round * unit_;
      high_ %= round;
    }
  }

  /// Steps to the next visible segment; false at the end.
  LONGSPAN_HD bool next() {
    while (next_ < end_) {
      if (next_ >= leaf_end_) enter(next_ >> bits_);
      const int at = next_ > first_ ? next_ : first_;
      if (at < last_) {
        next_ = at + 1;
        const int t = at - leaf_begin_;
        place = at;
        segment = !order_.interleaved ? base_ + t
                  : unit_ == 1        ? t * order_.leaves + base_
                                      : (t / unit_ * order_.leaves + base_) * unit_ + t % unit_;
        return true;
      }
      next_ = first_ < last_ || order_.interleaved ? leaf_end_ : beyond_nothing();
    }
    return false;
  }

 private:
  LONGSPAN_HD static int clamp(int x, int most) { return x < 0 ? 0 : x < most ? x : most; }

  /// The index at which the leaf of the next visible segment begins, for contiguous keys and from a
  /// leaf without visible segments. A short sequence leaves most leaves empty, and a window hides
  /// most of them.
  LONGSPAN_HD int beyond_nothing() const {
    const int stop = static_cast<int>(order_.begin((leaf_begin_ >> bits_) + 1));
    const int next = stop > low_ ? stop : low_;  // segment
    if (next >= high_) return end_;
    const unsigned total = static_cast<unsigned>(order_.total);
    if (total > 1u << 24) return leaf_end_;  // the product below has 32 bits
    const auto cut = static_cast<unsigned>(even_cut(order_.total, order_.first, kVirtualRanks));
    const unsigned count = static_cast<unsigned>(next) + cut + 1;
    const unsigned leaf = (count * kVirtualRanks - 1) / total;  // the first with a cut >= count
    return (static_cast<int>(leaf) - order_.first) << bits_;
  }

  LONGSPAN_HD void enter(int leaf) {
    leaf_begin_ = leaf << bits_;
    leaf_end_ = (leaf + 1) << bits_;
    int shift, count;  // of the leaf's visible segments against the rank's
    if (order_.interleaved) {
      base_ = reverse_bits(leaf, log2_ceil(order_.leaves));
      shift = base_ * unit_;
      count = unit_;
    } else {
      base_ = shift = static_cast<int>(order_.begin(leaf));
      count = static_cast<int>(order_.begin(leaf + 1)) - base_;
    }
    first_ = leaf_begin_ + low_rounds_ + clamp(low_ - shift, count);
    last_ = leaf_begin_ + high_rounds_ + clamp(high_ - shift, count);
    if (last_ > end_) last_ = end_;
  }

  SegmentOrder order_;
  int bits_, unit_;
  int next_, end_;                // indices
  int low_, high_;                // visible local segments; interleaved: their remainders in a
                                  // round
  int low_rounds_, high_rounds_;  // interleaved
  int leaf_begin_, leaf_end_;     // indices of the leaf
  int first_, last_;              // the visible ones of them
  int base_;                      // contiguous: its first segment; otherwise its number
};

/// The level on which the subtree of index `from` waits when the walk continues at index `to` >
/// from.
LONGSPAN_HD inline int finished_level(std::int64_t from, std::int64_t to) {
  return arch::highest_bit(static_cast<std::uint64_t>(from ^ to));
}

/// The most states that wait at a time while a sequence of up to `keys` keys folds. In every layout
/// the occupied indices are so dense that one level more than for a full tree is enough.
inline int fold_depth(std::int64_t keys) {
  int depth = 2;
  while ((std::int64_t{1} << (depth - 2)) < segments_of(keys)) ++depth;
  return depth;
}

}  // namespace longspan::kernels::cuda
