// The stretches of keys that a rank has, and the portions in which it sends them.
#include "src/strategy/shared/sent_rows.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace longspan {
namespace {

bool operator==(const Stretch& a, const Stretch& b) {
  return a.first == b.first && a.count == b.count && a.position == b.position;
}

TEST(Stretches, OfAZigzag) {
  const auto found = stretches_of(Shard::zigzag(800, 1, 4), 800);
  ASSERT_TRUE(found);
  ASSERT_EQ(found->size(), 2u);
  EXPECT_TRUE((*found)[0] == (Stretch{0, 100, 100}));
  EXPECT_TRUE((*found)[1] == (Stretch{100, 100, 600}));
  EXPECT_EQ(count_rows(*found), 200);
}

TEST(Stretches, AreNotTakenWhereThereAreMany) {
  EXPECT_FALSE(stretches_of(Shard::striped(100, 0, 2), 100));
  EXPECT_TRUE(stretches_of(Shard::striped(2 * static_cast<int>(kMostStretches), 0, 2), 8));
}

/// All rows once, from the last of the sequence to the first, in no more portions than may be.
void expect_portions(const std::vector<Stretch>& stretches, int most) {
  SCOPED_TRACE(::testing::Message() << stretches.size() << " stretches, " << most << " portions");
  const std::vector<Stretch> portions = in_portions(stretches, most);
  EXPECT_LE(portions.size(), std::max(static_cast<std::size_t>(most), stretches.size()));
  EXPECT_EQ(count_rows(portions), count_rows(stretches));
  for (std::size_t i = 0; i < portions.size(); ++i) {
    const Stretch& one = portions[i];
    EXPECT_GT(one.count, 0);
    if (i > 0) {
      EXPECT_LE(one.position + one.count, portions[i - 1].position);
    }
    const bool lies_in_one = std::any_of(stretches.begin(), stretches.end(), [&](const Stretch& s) {
      return one.first >= s.first && one.first + one.count <= s.first + s.count &&
             one.position - s.position == one.first - s.first;
    });
    EXPECT_TRUE(lies_in_one);
  }
}

TEST(Stretches, InPortions) {
  for (int most = 1; most <= 9; ++most) {
    expect_portions({}, most);
    expect_portions({{0, 1, 5}}, most);
    expect_portions({{0, 1000, 0}}, most);
    expect_portions({{0, 7, 3}, {7, 501, 900}}, most);
    expect_portions({{0, 100, 600}, {100, 100, 0}, {200, 3, 200}, {203, 40, 300}}, most);
  }
}

TEST(Stretches, InPortionsOfOneLength) {
  const auto portions = in_portions({{0, 400, 0}, {400, 400, 1200}}, 4);
  ASSERT_EQ(portions.size(), 4u);
  EXPECT_TRUE(portions[0] == (Stretch{600, 200, 1400}));
  EXPECT_TRUE(portions[1] == (Stretch{400, 200, 1200}));
  EXPECT_TRUE(portions[2] == (Stretch{200, 200, 200}));
  EXPECT_TRUE(portions[3] == (Stretch{0, 200, 0}));
}

TEST(Stretches, TheirEnds) {
  const std::vector<Stretch> ends = ends_of({{0, 20, 100}, {20, 21, 500}, {41, 3, 7}}, 10);
  ASSERT_EQ(ends.size(), 4u);
  EXPECT_TRUE(ends[0] == (Stretch{0, 20, 100})) << "the two ends are all of it";
  EXPECT_TRUE(ends[1] == (Stretch{20, 10, 500}));
  EXPECT_TRUE(ends[2] == (Stretch{31, 10, 511}));
  EXPECT_TRUE(ends[3] == (Stretch{41, 3, 7}));
}

/// Own stretches stand whole in the list, with their rows; the portions of others with the signal
/// of the rank in the row of their piece.
TEST(SentRows, AreListedFromTheLastOfTheSequenceToTheFirst) {
  const std::vector<SentRows> ranks = {
      {{{0, 100, 0}, {100, 100, 300}}, 2}, {{{0, 100, 100}, {100, 100, 200}}, 4}, {{}, 2}};
  EXPECT_EQ(most_portions(ranks), 4u);
  kernels::KeyArrivals::Portion list[kernels::KeyArrivals::kMostPortions] = {};
  const auto expect = [&](int own, const std::vector<std::pair<int, int>>& expected) {
    ASSERT_EQ(list_portions(ranks, own, list), static_cast<int>(expected.size()));
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_EQ(list[i].begin, expected[i].first) << i;
      EXPECT_EQ(list[i].place, expected[i].second) << i;
    }
  };
  // Pieces 1, 2, ... of rank p are signals 3 + p, 6 + p, ...
  expect(0, {{300, 100}, {250, ~4}, {200, ~7}, {150, ~10}, {100, ~13}, {0, 0}});
  expect(1, {{300, ~3}, {200, 100}, {100, 0}, {0, ~6}});
  expect(2, {{300, ~3}, {250, ~4}, {200, ~7}, {150, ~10}, {100, ~13}, {0, ~6}});
}

}  // namespace
}  // namespace longspan
