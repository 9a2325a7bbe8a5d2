// The fixed order (longspan/order.hpp) on the device: the segments of one piece of work in the
// order of the tree's leaves, and the stack of states that folds them.
//
// A segment's place in the tree is leaf << bits | t, where 2^bits >= the segments of any leaf: the
// trees of the leaves and the tree over the leaves are then one binary tree. Segments that nobody
// sees are left out. Going from place p to place i > p with k = the highest bit of p ^ i, the
// subtree of 2^k places around p is complete: its states fold, the newest first, and the result
// waits on level k for its sibling. Missing places therefore keep the bits.
#pragma once

#include <cstdint>

#include "kernels/params.hpp"
#include "longspan/order.hpp"
#include "longspan/state.hpp"

#if defined(__CUDACC__)
#define LONGSPAN_APART __noinline__
#else
#define LONGSPAN_APART
#endif

namespace longspan::kernels::cuda {

/// Bits of a place inside a leaf.
LONGSPAN_HD inline int leaf_bits(const SegmentOrder& order) {
  const std::int64_t most =
      order.interleaved ? order.count(0) : (order.total + kVirtualRanks - 1) / kVirtualRanks;
  int bits = 0;
  while ((std::int64_t{1} << bits) < most) ++bits;
  return bits;
}

/// The visible segments of one split, in the order of their places.
class SegmentWalk {
 public:
  std::int64_t place;    // in the tree
  std::int64_t segment;  // local

  SegmentWalk() = default;

  /// Part `split` of `splits` of the tree; `any`: the local keys that are visible at all.
  LONGSPAN_HD SegmentWalk(const SegmentOrder& order, const Interval& any, int split, int splits)
      : order_(order), bits_(leaf_bits(order)), leaf_(-1) {
    const std::int64_t size = static_cast<std::int64_t>(order.leaves) << bits_;
    const int shift = log2_ceil(splits);  // a power of two
    next_ = size * split >> shift;
    end_ = any.empty() ? next_ : size * (split + 1) >> shift;
    low_ = any.begin / kSegment;
    high_ = segments_of(any.end);
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
      const int leaf = static_cast<int>(next_ >> bits_);
      if (leaf != leaf_) enter(leaf);
      std::int64_t t = next_ - (static_cast<std::int64_t>(leaf) << bits_);
      if (t < first_) t = first_;
      place = (static_cast<std::int64_t>(leaf) << bits_) + t;
      if (t < last_ && place < end_) {
        next_ = place + 1;
        segment = !order_.interleaved ? base_ + t
                  : order_.unit == 1
                      ? t * order_.leaves + base_
                      : (t / order_.unit * order_.leaves + base_) * order_.unit + t % order_.unit;
        return true;
      }
      next_ = static_cast<std::int64_t>(leaf + 1) << bits_;
    }
    return false;
  }

 private:
  LONGSPAN_HD static std::int64_t clamp(std::int64_t x, std::int64_t most) {
    return x < 0 ? 0 : x < most ? x : most;
  }

  /// The visible segments of a leaf: t in [first, last).
  struct Leaf {
    std::int64_t base, first, last;
  };

  LONGSPAN_HD void enter(int leaf) {
    leaf_ = leaf;
    const Leaf entered = enter(order_, leaf, low_, high_, order_.interleaved ? low_rounds_ : 0,
                               order_.interleaved ? high_rounds_ : 0);
    base_ = entered.base;
    first_ = entered.first;
    last_ = entered.last;
  }

  /// Not inlined, by value: rare beside the steps in a leaf, and large. What a block runs through
  /// once it also fetches once, from memory that others stream through.
  LONGSPAN_HD static LONGSPAN_APART Leaf enter(SegmentOrder order, int leaf, std::int64_t low,
                                               std::int64_t high, std::int64_t low_rounds,
                                               std::int64_t high_rounds) {
    if (order.interleaved) {
      const std::int64_t base = reverse_bits(leaf, log2_ceil(order.leaves));
      return {base, low_rounds + clamp(low - base * order.unit, order.unit),
              high_rounds + clamp(high - base * order.unit, order.unit)};
    }
    const std::int64_t base = order.begin(leaf);
    const std::int64_t count = order.begin(leaf + 1) - base;
    return {base, clamp(low - base, count), clamp(high - base, count)};
  }

  SegmentOrder order_;
  int bits_;
  int leaf_;
  std::int64_t next_, end_;
  std::int64_t low_, high_;  // visible local segments; interleaved: their rest in a round
  std::int64_t low_rounds_, high_rounds_;  // interleaved
  std::int64_t base_, first_, last_;       // of the leaf
};

/// The level on which the subtree of place `from` waits when the walk goes on at place `to`.
LONGSPAN_HD inline int finished_level(std::int64_t from, std::int64_t to) {
  const std::uint64_t changed = static_cast<std::uint64_t>(from ^ to);
  int level = 0;
  while (changed >> level > 1) ++level;
  return level;
}

/// The most states that wait at a time in the fold of a sequence of up to `keys` keys. In every
/// layout the occupied places are dense enough for one more level than a full tree.
inline int fold_depth(std::int64_t keys) {
  int depth = 2;
  while ((std::int64_t{1} << (depth - 2)) < segments_of(keys)) ++depth;
  return depth;
}

}  // namespace longspan::kernels::cuda
