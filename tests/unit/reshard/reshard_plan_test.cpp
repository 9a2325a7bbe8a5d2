// The plan of a reshard, as laws: the runs of all pairs of ranks have every key once, at its place
// in both layouts, and both ranks of a pair list the same keys in the same order.
#include "src/reshard/reshard_plan.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/draw_cache_ranks.hpp"
#include "tests/support/fresh_seed.hpp"

namespace longspan {
namespace {

using tests::kReshardLayouts;

class ReshardPlanTest : public ::testing::Test {
 protected:
  std::int64_t below(std::int64_t n) {
    return std::uniform_int_distribution<std::int64_t>(0, n - 1)(random_);
  }

  CacheRanks draw_ranks(Layout layout, int world, const std::vector<std::int64_t>& lengths) {
    return tests::draw_cache_ranks(layout, world, lengths,
                                   [this](std::int64_t n) { return below(n); });
  }

  const unsigned seed_ = tests::fresh_seed();
  std::mt19937 random_{seed_};
};

/// A key that travels: its sequence and its position.
using Key = std::pair<int, std::int64_t>;

/// The keys of a part, by the old layout where they leave and by the new one where they arrive.
std::vector<Key> keys_of(const ReshardOptions& o, const ReshardPlan::Side& side, int part, int rank,
                         bool is_leaving) {
  std::vector<Key> keys;
  const ReshardPlan::Part& p = side.parts[static_cast<std::size_t>(part)];
  std::int64_t row = p.first_row;
  for (std::int64_t n = p.first_run; n < p.first_run + p.runs; ++n) {
    const kernels::KeyRun& run = side.runs[static_cast<std::size_t>(n)];
    EXPECT_GE(run.count, 1);
    EXPECT_LE(run.count, kernels::KeyRun::kMostKeys);
    EXPECT_EQ(is_leaving ? run.to_key : run.from_key, row) << "rows lie side by side";
    row += run.count;
    const std::int64_t length = o.lengths[static_cast<std::size_t>(run.sequence)];
    const Shard shard = shard_of(is_leaving ? o.from : o.to, rank, run.sequence, length);
    const std::int64_t first = is_leaving ? run.from_key : run.to_key;
    for (std::int64_t i = first; i < first + run.count; ++i) {
      EXPECT_LT(i, shard.local_len(length));
      keys.emplace_back(run.sequence, shard.position(i, length));
    }
  }
  EXPECT_EQ(row, p.first_row + p.rows);
  return keys;
}

TEST_F(ReshardPlanTest, EveryKeyGoesOnceToWhereItBelongs) {
  for (const Layout from : kReshardLayouts)
    for (const Layout to : kReshardLayouts)
      for (int draw = 0; draw < 4; ++draw) {
        const int world = static_cast<int>(1 + below(6));
        ReshardOptions o{.lengths = {below(900), 0, below(20), 1 + below(300)}};
        o.from = draw_ranks(from, world, o.lengths);
        o.to = draw_ranks(to, world, o.lengths);
        SCOPED_TRACE(std::string(name(from)) + " on " + std::to_string(o.from.ranks) + " to " +
                     name(to) + " on " + std::to_string(o.to.ranks) + " of " +
                     std::to_string(world) + ", seed " + std::to_string(seed_));
        std::vector<ReshardPlan> plans;
        for (int rank = 0; rank < world; ++rank) plans.push_back(plan_reshard(o, rank, world));
        std::vector<Key> all;
        for (int rank = 0; rank < world; ++rank)
          for (int d = 0; d < world; ++d) {
            const int other = (rank + d) % world;
            const auto sent = keys_of(o, plans[rank].leaving, d, rank, true);
            EXPECT_EQ(sent, keys_of(o, plans[other].arriving, d, other, false));
            EXPECT_TRUE(std::is_sorted(sent.begin(), sent.end()));
            all.insert(all.end(), sent.begin(), sent.end());
          }
        std::sort(all.begin(), all.end());
        std::vector<Key> expected;
        for (int b = 0; b < static_cast<int>(o.lengths.size()); ++b)
          for (std::int64_t i = 0; i < o.lengths[static_cast<std::size_t>(b)]; ++i)
            expected.emplace_back(b, i);
        EXPECT_EQ(all, expected);
      }
}

TEST_F(ReshardPlanTest, PartsLieBehindEachOtherInOneBuffer) {
  ReshardOptions o{.lengths = {1000, 77}};
  o.from = {.rule = {Layout::zigzag}, .ranks = 4};
  o.to = {.rule = {Layout::striped}, .first_rank = 1, .ranks = 2};
  for (int rank = 0; rank < 4; ++rank) {
    const ReshardPlan plan = plan_reshard(o, rank, 4);
    std::int64_t row = 0;
    for (int d = 1; d < 4; ++d) {
      EXPECT_EQ(plan.leaving.parts[d].first_row, row);
      row += plan.leaving.parts[d].rows;
    }
    for (int d = 0; d < 4; ++d) {
      EXPECT_EQ(plan.arriving.parts[d].first_row, row);
      row += plan.arriving.parts[d].rows;
    }
    EXPECT_EQ(plan.rows, row);
    EXPECT_EQ(plan.leaving.parts[0].first_row, plan.arriving.parts[0].first_row);
    EXPECT_EQ(plan.leaving.parts[0].rows, plan.arriving.parts[0].rows);
  }
}

/// Blocks stay whole, up to the limit of one run.
TEST_F(ReshardPlanTest, RunsAreAsLongAsPositionsAreConsecutive) {
  std::vector<kernels::KeyRun> runs;
  add_common_runs(Shard::interleaved(4096, 1, 4), Shard::contiguous(4096, 0, 2), 4096, 0, runs);
  ASSERT_EQ(runs.size(), 4U);
  for (std::size_t n = 0; n < runs.size(); ++n) {
    EXPECT_EQ(runs[n].count, 128);
    EXPECT_EQ(runs[n].from_key, static_cast<std::int64_t>(n) * 128);
    EXPECT_EQ(runs[n].to_key, 128 + static_cast<std::int64_t>(n) * 512);
  }
  runs.clear();
  add_common_runs(Shard{}, Shard{}, 100000, 0, runs);
  ASSERT_EQ(runs.size(), 1U);
  EXPECT_EQ(runs[0].count, 100000);
}

}  // namespace
}  // namespace longspan
