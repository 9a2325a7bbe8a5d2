// The walk of the CUDA kernels against the order of longspan/order.hpp, on the host. It visits the
// visible keys in the order of places, and the stack's rule folds them into the order's tree.
#include "kernels/cuda/common/fixed_order.cuh"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/common/fold_plan.cuh"
#include "kernels/cuda/common/view.cuh"
#include "longspan/shard.hpp"
#include "tests/support/fresh_seed.hpp"

namespace longspan::kernels::cuda {
namespace {

/// A tree over the places of segments, as text: "(a b)" folds a with b. Empty sides vanish.
std::string tree_of(const std::map<std::int64_t, std::string>& leaves, std::int64_t first,
                    int level) {
  if (level == 0) return leaves.contains(first) ? leaves.at(first) : "";
  const std::string a = tree_of(leaves, first, level - 1);
  const std::string b = tree_of(leaves, first + (std::int64_t{1} << (level - 1)), level - 1);
  if (a.empty()) return b;
  return b.empty() ? a : "(" + a + " " + b + ")";
}

/// The stack's tree for a walk.
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

/// The layouts in turn.
Shard draw_shard(std::mt19937& rng, int trial, std::int64_t length, int rank, int ranks) {
  return trial % 3 == 0   ? Shard::interleaved(length, rank, ranks, kSegment << rng() % 4)
         : trial % 3 == 1 ? Shard::contiguous(length, rank, ranks)
                          : Shard::striped(length, rank, ranks);
}

/// A rank's part of a sequence, and the local keys that some row sees: all or some.
struct Drawn {
  Shard shard;
  std::int64_t length;
  SegmentOrder order;
  Interval any;
};

Drawn draw(std::mt19937& rng, int trial) {
  const int ranks = 1 << rng() % 7, rank = static_cast<int>(rng()) & (ranks - 1);
  const std::int64_t length = static_cast<std::int64_t>(rng() % (trial % 2 ? 3000 : 60000));
  const Shard shard = draw_shard(rng, trial, length, rank, ranks);
  const std::int64_t own = shard.local_len(length);
  Interval any{0, own};
  if (trial % 4 == 3 && own > 0) {
    any.begin = static_cast<std::int64_t>(rng()) % own;
    any.end = any.begin + static_cast<std::int64_t>(rng()) % (own - any.begin + 1);
  }
  return {shard, length, shard.order(length), any};
}

TEST(FixedOrder, WalkAndStackMakeTheTree) {
  std::mt19937 rng(tests::fresh_seed());
  for (int trial = 0; trial < 2000; ++trial) {
    const Drawn drawn = draw(rng, trial);
    const auto& [shard, length, order, any] = drawn;
    const std::string expected =
        any.empty() ? "" : expected_of(order, any.begin / kSegment, segments_of(any.end));
    int depth = 0;
    EXPECT_EQ(fold_of(SegmentWalk(order, any, 0, 1), &depth), expected)
        << name(shard.layout) << " " << shard.rank << "/" << shard.ranks << " length " << length;
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

/// The consumers' tree for a planned walk. `most_far` becomes the most states that wait far.
std::string fold_of(PlannedWalk walk, int segments, int* most_far) {
  std::string newest, held, near;
  std::vector<std::string> far;
  const auto take = [&](std::string& older) {
    EXPECT_FALSE(older.empty());
    newest = "(" + older + " " + newest + ")";
    older.clear();
  };
  for (int i = 0; i < segments; ++i) {
    walk.next();
    newest = std::to_string(walk.segment);
    EXPECT_EQ(walk.step.takes_held(), !held.empty()) << "what is held is taken next";
    if (walk.step.takes_held()) take(held);
    if (walk.step.takes_near()) take(near);
    for (int n = walk.step.takes_far(); n > 0 && !far.empty(); --n) {
      take(far.back());
      far.pop_back();
    }
    if (walk.step.then() == Waits::held) held = newest;
    if (walk.step.then() == Waits::near) {
      EXPECT_TRUE(near.empty());
      near = newest;
    }
    if (walk.step.then() == Waits::far) {
      EXPECT_TRUE(near.empty()) << "what waits near is the newer one";
      far.push_back(newest);
    }
    EXPECT_EQ(walk.step.then() == Waits::nowhere, i + 1 == segments);
    *most_far = std::max(*most_far, static_cast<int>(far.size()));
  }
  EXPECT_TRUE(held.empty() && near.empty() && far.empty());
  return newest;
}

TEST(FixedOrder, PlansMakeTheTree) {
  std::mt19937 rng(tests::fresh_seed());
  for (int trial = 0; trial < 2000; ++trial) {
    const Drawn drawn = draw(rng, trial);
    const auto& [shard, length, order, any] = drawn;
    if (any.empty()) continue;
    const std::int64_t segments = segments_of(any.end) - any.begin / kSegment;
    SCOPED_TRACE("length " + std::to_string(length) + ", rank " + std::to_string(shard.rank) +
                 " of " + std::to_string(shard.ranks) + ", " + name(shard.layout));
    int depth = 0, most_far = 0;
    const std::string expected = fold_of(SegmentWalk(order, any, 0, 1), &depth);
    EXPECT_EQ(fold_of(PlannedWalk(order, any), static_cast<int>(segments), &most_far), expected);
    EXPECT_LE(most_far, fold_depth(length));
  }
}

/// In a full tree half of the states are held, and a quarter wait near.
TEST(FixedOrder, PlansHoldWhatComesSoonest) {
  const std::int64_t length = kSegment << 9;
  PlannedWalk walk(Shard::contiguous(length, 0, 1).order(length), {0, length});
  std::map<Waits, int> count;
  for (int i = 0; i < 512; ++i) {
    walk.next();
    ++count[walk.step.then()];
  }
  EXPECT_EQ(count[Waits::held], 256);
  EXPECT_EQ(count[Waits::near], 128);
  EXPECT_EQ(count[Waits::far], 127);
  EXPECT_EQ(count[Waits::nowhere], 1);
}

/// Each turn takes its own split, of those that are held. All segments are in them, and folded by
/// their numbers they make the tree.
void expect_tree_of(const WorkPlan& plan, const SplitsTaken& taken, const SegmentOrder& order,
                    const Interval& all) {
  ASSERT_LE(taken.leaf_splits, plan.numbers.leaf_splits);
  std::map<std::int64_t, std::string> roots;
  int depth = 0;
  for (int turn = 0; turn < taken.turns; ++turn) {
    const TileCoord work{0, 0, plan.numbers.split(turn, taken.leaf_splits), 0, 1, {}};
    ASSERT_LT(work.split, plan.splits);
    EXPECT_TRUE(plan.numbers.holds(taken, work.split));
    EXPECT_FALSE(roots.contains(work.split));
    const TreeCut cut = tree_cut({}, plan, work, taken.leaf_splits);
    roots[work.split] = fold_of(SegmentWalk(order, all, cut.split, cut.splits), &depth);
  }
  int held = 0;
  for (int split = 0; split < plan.splits; ++split) held += plan.numbers.holds(taken, split);
  EXPECT_EQ(held, taken.turns);
  std::erase_if(roots, [](const auto& root) { return root.second.empty(); });
  EXPECT_EQ(tree_of(roots, 0, log2_ceil(plan.splits)),
            fold_of(SegmentWalk(order, all, 0, 1), &depth));
}

/// The splits that suit the length of one sequence, and those of several sequences, cut or not.
TEST(FixedOrder, TakenSplitsMakeTheTree) {
  std::mt19937 rng(tests::fresh_seed());
  for (int trial = 0; trial < 2000; ++trial) {
    const int ranks = 1 << rng() % 6, rank = static_cast<int>(rng()) & (ranks - 1);
    const std::int64_t length = static_cast<std::int64_t>(rng() % (trial % 2 ? 3000 : 300000));
    const Shard shard = draw_shard(rng, trial, length, rank, ranks);
    const SegmentOrder order = shard.order(length);
    const Interval all{0, shard.local_len(length)};
    WorkPlan one;
    one.numbers.leaves = log2_ceil(order.leaves);
    one.numbers.leaf_splits = 1 + static_cast<int>(rng() % 4);
    one.numbers.reversed = shard.layout == Layout::interleaved;
    one.splits = 1 << (one.numbers.leaves + one.numbers.leaf_splits);
    for (int fill = 0; fill < kFills; ++fill)
      one.numbers.worth |= (rng() % (one.numbers.leaf_splits + 1)) << 4 * fill;
    SCOPED_TRACE("length " + std::to_string(length) + ", rank " + std::to_string(shard.rank) +
                 " of " + std::to_string(shard.ranks) + ", " + name(shard.layout));
    expect_tree_of(one, splits_taken(order, one.numbers), order, all);

    WorkPlan several;
    several.numbers.leaves = static_cast<int>(rng() % 5);
    several.numbers.leaf_splits = 1 + static_cast<int>(rng() % 3);
    several.splits = 1 << (several.numbers.leaves + several.numbers.leaf_splits);
    for (const bool cut : {false, true})
      expect_tree_of(several, several.numbers.all_of(cut), order, all);
  }
}

/// Splits without keys are not taken. Where one leaf after the other has a segment more, they are
/// not counted either.
TEST(FixedOrder, SplitsBeyondTheLastKeyAreLeft) {
  SplitNumbers numbers{4, 4, true, nullptr};  // 16 leaves, as on the first of four ranks
  // Half full: 16 splits of a leaf; a sixteenth more, and beyond: 8.
  numbers.worth = 0x3333'3333'3333'3334;
  const auto taken = [&](std::int64_t segments) {
    return splits_taken({true, 16, 0, segments, 1}, numbers);
  };
  EXPECT_EQ(taken(256).leaf_splits, 3);
  EXPECT_EQ(taken(256).turns, 128);
  EXPECT_EQ(taken(257).leaf_splits, 4);  // of a tree of 512: the same two segments
  EXPECT_EQ(taken(257).turns, 129);
  EXPECT_EQ(taken(272).leaf_splits, 3);
  EXPECT_EQ(taken(272).turns, 80);  // 64 of four segments, 16 of one
  EXPECT_EQ(taken(1).turns, 1);
  EXPECT_EQ(taken(0).turns, 0);
  EXPECT_EQ(splits_taken({false, 64, 0, 257, 1}, {6, 2, false, nullptr, 0}).turns, 64);
}

}  // namespace
}  // namespace longspan::kernels::cuda
