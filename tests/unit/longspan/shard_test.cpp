// Every key of a sequence is on exactly one rank, for any layout, length and ranks.
#include "longspan/shard.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <vector>

namespace longspan {
namespace {

Shard make(Layout layout, std::int64_t length, int rank, int ranks, std::int64_t block,
           const std::int64_t* table) {
  Shard shard{layout, rank, ranks, length, block, table};
  return shard;
}

RC_GTEST_PROP(Shard, KeysArePartitioned, ()) {
  const auto length = *rc::gen::weightedOneOf<std::int64_t>(
      {{3, rc::gen::inRange<std::int64_t>(0, 3000)}, {1, rc::gen::inRange<std::int64_t>(0, 9)}});
  const int ranks = *rc::gen::inRange(1, 10);
  const auto block = *rc::gen::element<std::int64_t>(1, 7, 16, 128, 256);
  const auto layout = *rc::gen::element(Layout::contiguous, Layout::ranges, Layout::zigzag,
                                        Layout::striped, Layout::interleaved);
  std::vector<std::int64_t> cuts(ranks + 1, 0);
  for (int r = 1; r < ranks; ++r) cuts[r] = *rc::gen::inRange<std::int64_t>(0, length + 1);
  cuts[ranks] = length;
  std::sort(cuts.begin(), cuts.end());

  std::vector<int> seen(length, 0);
  std::int64_t most = 0;
  for (int r = 0; r < ranks; ++r) {
    const Shard shard = make(layout, length, r, ranks, block, cuts.data());
    const std::int64_t own = shard.local_len(length);
    most = std::max(most, own);
    for (std::int64_t i = 0; i < own; ++i) {
      const std::int64_t position = shard.position(i, length);
      RC_ASSERT(position >= 0 && position < length);
      RC_ASSERT(i == 0 || shard.position(i - 1, length) < position);
      ++seen[position];
    }
  }
  RC_ASSERT(std::all_of(seen.begin(), seen.end(), [](int n) { return n == 1; }));
  RC_ASSERT(make(layout, length, 0, ranks, block, cuts.data()).max_local_len(length) == most);
}

RC_GTEST_PROP(Shard, ContiguousIsEvenToOneSegment, ()) {
  const auto length = *rc::gen::inRange<std::int64_t>(0, 1 << 20);
  const int ranks = *rc::gen::inRange(1, 65);
  std::int64_t least = length, most = 0;
  for (int r = 0; r < ranks; ++r) {
    const std::int64_t own = segments_of(Shard::contiguous(length, r, ranks).local_len(length));
    least = std::min(least, own);
    most = std::max(most, own);
  }
  RC_ASSERT(most - least <= 1);
}

TEST(Shard, ListedKeysStandWhereTheTableSays) {
  const std::vector<std::int64_t> positions{9, 2, 5};
  const Shard shard = Shard::at_positions(12, 1, 2, positions.data(), 3);
  EXPECT_EQ(shard.local_len(12), 3);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(shard.position(i, 12), positions[i]);
}

TEST(Shard, OnlyCutsOfTheTreeKeepTheOrder) {
  EXPECT_TRUE(Shard::contiguous(1000, 0, 4).keeps_order());
  EXPECT_TRUE(Shard::interleaved(1000, 0, 4, 256).keeps_order());
  EXPECT_FALSE(Shard::interleaved(1000, 0, 4, 16).keeps_order());
  EXPECT_FALSE(Shard::contiguous(1000, 0, 3).keeps_order());
  EXPECT_FALSE(Shard::zigzag(1000, 0, 4).keeps_order());
  EXPECT_FALSE(Shard::striped(1000, 0, 4).keeps_order());
}

TEST(Shard, OffsetsPast32Bits) {
  const std::int64_t length = std::int64_t{1} << 40;
  const Shard shard = Shard::interleaved(length, 3, 4, 1 << 20);
  EXPECT_EQ(shard.local_len(length), length / 4);
  EXPECT_EQ(shard.position(length / 4 - 1, length), length - 1);
  const SegmentOrder order = Shard::contiguous(length, 3, 4).order(length);
  EXPECT_EQ(order.segment(15, order.count(15) - 1), segments_of(length / 4) - 1);
}

}  // namespace
}  // namespace longspan
