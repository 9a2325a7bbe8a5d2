// The fixed order (longspan/order.hpp) on the device: the segments of one piece of work in the
// order of the tree's leaves, and the stack of states that folds them.
//
// A segment's place in the tree is leaf << bits | t, where 2^bits >= the segments of any leaf: the
// trees of the leaves and the tree over the leaves are then one binary tree. Segments that nobody
// sees are left out. Going from place p to place i > p with k = the highest bit of p ^ i, the
// subtree of 2^k places around p is complete: its states fold, the newest first, and the result
// waits on level k for its sibling. Missing places therefore keep the bits.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/params.hpp"
#include "longspan/order.hpp"
#include "longspan/state.hpp"

namespace longspan::kernels::cuda {

/// Bits of a place inside a leaf.
LONGSPAN_HD inline int leaf_bits(const SegmentOrder& order) {
  const std::int64_t most =
      order.interleaved ? order.count(0) : (order.total + kVirtualRanks - 1) / kVirtualRanks;
  return log2_ceil(static_cast<int>(most));  // segments of a leaf: fewer than 2^31
}

/// The visible segments of one split, in the order of their places. On a GPU this stands before the
/// first key of a piece of work, so it is spared instructions: a leaf that is entered is worked out
/// once, and steps inside it add one.
class SegmentWalk {
 public:
  std::int64_t place;    // in the tree
  std::int64_t segment;  // local

  SegmentWalk() = default;

  /// Part `split` of `splits` of the tree; `any`: the local keys that are visible at all.
  LONGSPAN_HD SegmentWalk(const SegmentOrder& order, const Interval& any, int split, int splits)
      : order_(order), bits_(leaf_bits(order)) {
    const std::int64_t size = static_cast<std::int64_t>(order.leaves) << bits_;
    const int shift = log2_ceil(splits);  // a power of two
    next_ = size * split >> shift;
    end_ = any.empty() ? next_ : size * (split + 1) >> shift;
    leaf_end_ = next_;
    low_ = any.begin / kSegment;
    high_ = segments_of(any.end);
    low_rounds_ = high_rounds_ = 0;
    if (order.interleaved) {
      const std::int64_t round = order.unit * order.leaves;
      low_rounds_ = low_ / round * order.unit;
      low_ %= round;
      high_rounds_ = high_ / round * order.unit;
      high_ %= round;
    }
  }

  /// Steps to the next visible segment; false at the end.
  LONGSPAN_HD bool next() {
    while (next_ < end_) {
      if (next_ >= leaf_end_) enter(static_cast<int>(next_ >> bits_));
      place = next_ > first_ ? next_ : first_;
      if (place < last_) {
        next_ = place + 1;
        const std::int64_t t = place - leaf_begin_;
        segment = !order_.interleaved ? base_ + t
                  : order_.unit == 1
                      ? t * order_.leaves + base_
                      : (t / order_.unit * order_.leaves + base_) * order_.unit + t % order_.unit;
        return true;
      }
      next_ = leaf_end_;
    }
    return false;
  }

 private:
  LONGSPAN_HD static std::int64_t clamp(std::int64_t x, std::int64_t most) {
    return x < 0 ? 0 : x < most ? x : most;
  }

  LONGSPAN_HD void enter(int leaf) {
    leaf_begin_ = static_cast<std::int64_t>(leaf) << bits_;
    leaf_end_ = static_cast<std::int64_t>(leaf + 1) << bits_;
    std::int64_t shift, count;  // of the leaf's visible segments against the rank's
    if (order_.interleaved) {
      base_ = reverse_bits(leaf, log2_ceil(order_.leaves));
      shift = base_ * order_.unit;
      count = order_.unit;
    } else {
      base_ = shift = order_.begin(leaf);
      count = order_.begin(leaf + 1) - base_;
    }
    first_ = leaf_begin_ + low_rounds_ + clamp(low_ - shift, count);
    last_ = leaf_begin_ + high_rounds_ + clamp(high_ - shift, count);
    if (last_ > end_) last_ = end_;
  }

  SegmentOrder order_;
  int bits_;
  std::int64_t next_, end_;  // places
  std::int64_t low_, high_;  // visible local segments; interleaved: their rest in a round
  std::int64_t low_rounds_, high_rounds_;  // interleaved
  std::int64_t leaf_begin_, leaf_end_;     // places of the leaf
  std::int64_t first_, last_;              // the visible ones of them
  std::int64_t base_;                      // contiguous: its first segment; else its number
};

/// The level on which the subtree of place `from` waits when the walk goes on at place `to`.
LONGSPAN_HD inline int finished_level(std::int64_t from, std::int64_t to) {
  const std::uint64_t changed = static_cast<std::uint64_t>(from ^ to);
#if defined(__CUDA_ARCH__)
  return 63 - __clzll(static_cast<long long>(changed));
#else
  return std::bit_width(changed) - 1;
#endif
}

/// The most states that wait at a time in the fold of a sequence of up to `keys` keys. In every
/// layout the occupied places are dense enough for one more level than a full tree.
inline int fold_depth(std::int64_t keys) {
  int depth = 2;
  while ((std::int64_t{1} << (depth - 2)) < segments_of(keys)) ++depth;
  return depth;
}

}  // namespace longspan::kernels::cuda
