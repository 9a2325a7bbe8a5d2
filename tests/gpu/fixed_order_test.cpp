// The walk of the CUDA kernels against the order of longspan/order.hpp, on the host: it visits what
// is visible, in the order of places, and the stack's rule folds it into the order's tree.
#include "kernels/cuda/fixed_order.cuh"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>
#include <vector>

#include "longspan/shard.hpp"

namespace longspan::kernels::cuda {
namespace {

/// A tree over the places of segments, written out: "(a b)" folds a with b. Empty sides vanish.
std::string tree_of(const std::map<std::int64_t, std::string>& leaves, std::int64_t first,
                    int level) {
  if (level == 0) return leaves.contains(first) ? leaves.at(first) : "";
  const std::string a = tree_of(leaves, first, level - 1);
  const std::string b = tree_of(leaves, first + (std::int64_t{1} << (level - 1)), level - 1);
  if (a.empty()) return b;
  return b.empty() ? a : "(" + a + " " + b + ")";
}

/// What the stack makes of a walk.
std::string fold_of(SegmentWalk walk, int* depth) {
  std::vector<std::pair<int, std::string>> waiting;
  std::string newest;
  bool more = walk.next();
  while (more) {
    const std::int64_t place = walk.place;
    newest = std::to_string(walk.segment);
    more = walk.next();
    const int level = more ? finished_level(place, walk.place) : 64;
    while (!waiting.empty() && waiting.back().first < level) {
      newest = "(" + waiting.back().second + " " + newest + ")";
      waiting.pop_back();
    }
    if (more) waiting.emplace_back(level, newest);
    *depth = std::max(*depth, static_cast<int>(waiting.size()));
  }
  return newest;
}

/// The same from order.hpp alone: the trees of the leaves under the tree of leaves.
std::string expected_of(const SegmentOrder& order, std::int64_t low, std::int64_t high) {
  std::map<std::int64_t, std::string> roots;
  for (int j = 0; j < order.leaves; ++j) {
    std::map<std::int64_t, std::string> segments;
    for (std::int64_t t = 0; t < order.count(j); ++t)
      if (order.segment(j, t) >= low && order.segment(j, t) < high)
        segments[t] = std::to_string(order.segment(j, t));
    const std::string root = tree_of(segments, 0, log2_ceil(static_cast<int>(order.count(j))));
    if (!root.empty()) roots[j] = root;
  }
  return tree_of(roots, 0, log2_ceil(order.leaves));
}

TEST(FixedOrder, WalkAndStackMakeTheTree) {
  std::mt19937 rng(std::random_device{}());
  for (int trial = 0; trial < 2000; ++trial) {
    const int ranks = 1 << rng() % 7, rank = static_cast<int>(rng()) & (ranks - 1);
    const std::int64_t length = static_cast<std::int64_t>(rng() % (trial % 2 ? 3000 : 60000));
    const Shard shard = trial % 3 == 0
                            ? Shard::interleaved(length, rank, ranks, kSegment << rng() % 4)
                        : trial % 3 == 1 ? Shard::contiguous(length, rank, ranks)
                                         : Shard::striped(length, rank, ranks);
    const SegmentOrder order = shard.order(length);
    const std::int64_t own = shard.local_len(length);
    Interval any{0, own};
    if (trial % 4 == 3 && own > 0) {
      any.begin = static_cast<std::int64_t>(rng()) % own;
      any.end = any.begin + static_cast<std::int64_t>(rng()) % (own - any.begin + 1);
    }
    const std::string expected =
        any.empty() ? "" : expected_of(order, any.begin / kSegment, segments_of(any.end));
    int depth = 0;
    EXPECT_EQ(fold_of(SegmentWalk(order, any, 0, 1), &depth), expected)
        << name(shard.layout) << " " << rank << "/" << ranks << " length " << length;
    EXPECT_LE(depth, fold_depth(length));

    for (int splits : {2, 8, 64}) {  // cut at nodes of the tree, folded neighbours first
      std::map<std::int64_t, std::string> parts;
      for (int s = 0; s < splits; ++s) {
        const std::string part = fold_of(SegmentWalk(order, any, s, splits), &depth);
        if (!part.empty()) parts[s] = part;
      }
      EXPECT_EQ(tree_of(parts, 0, log2_ceil(splits)), expected) << splits << " splits";
    }
  }
}

}  // namespace
}  // namespace longspan::kernels::cuda
