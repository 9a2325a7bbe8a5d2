// What is predicted of a run, and what "auto" makes of it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "longspan/error.hpp"
#include "longspan/options.hpp"
#include "longspan/strategy.hpp"

namespace longspan {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

const Forecast& of(const std::vector<Forecast>& all, const std::string& name) {
  for (const Forecast& f : all)
    if (name == f.strategy->name) return f;
  throw std::runtime_error("no strategy " + name);
}

/// Prefill of as many rows as keys, queries and keys dealt alike.
Options prefill(std::int64_t keys, int ranks, Layout layout) {
  return {.heads = 8,
          .kv_heads = 8,
          .dtypes = {.compute = DType::fp32},
          .mask = {.causal = true},
          .limits = {.max_tokens = (keys + ranks - 1) / ranks, .max_kv_len = keys},
          .keys = {layout},
          .queries = Sharding{layout}};
}

std::vector<Forecast> forecast_of(const Options& options, int ranks) {
  return forecast(options, {.ranks = ranks}, largest_run(options, ranks),
                  built_in_machine(Device::host));
}

TEST(Forecast, KnowsHowEvenTheWorkIs) {
  constexpr std::int64_t kKeys = 65536;
  for (const int ranks : {2, 4, 8}) {
    for (const Layout layout : {Layout::zigzag, Layout::striped, Layout::interleaved})
      for (const Forecast& f : forecast_of(prefill(kKeys, ranks, layout), ranks)) {
        if (!f.refusal.empty()) continue;
        EXPECT_NEAR(f.balance, 1, 0.03) << f.strategy->name;
      }
    // The last of P contiguous shares of the rows sees (2 P - 1) / P^2 of all pairs, and so is the
    // first share of the keys seen.
    for (const Forecast& f : forecast_of(prefill(kKeys, ranks, Layout::contiguous), ranks)) {
      if (f.balance == 1) continue;
      EXPECT_NEAR(f.balance, (2.0 * ranks - 1) / ranks, 0.01) << f.strategy->name;
    }
    const auto all = forecast_of(prefill(kKeys, ranks, Layout::contiguous), ranks);
    EXPECT_GT(of(all, "gather-kv").balance, 1.4);
    EXPECT_GT(of(all, "gather-states").balance, 1.4);
  }
  Options full = prefill(kKeys, 4, Layout::contiguous);
  full.mask.causal = false;
  for (const Forecast& f : forecast_of(full, 4)) EXPECT_NEAR(f.balance, 1, 0.01);
}

/// The pairs of a rank of a causal batch, counted one by one: of its rows, or of its keys.
double pairs(Layout layout, const std::vector<SequenceSize>& batch, bool by_keys, int rank,
             int ranks) {
  double own = 0;
  for (const SequenceSize& s : batch) {
    const Shard shard = Sharding{layout}.resolve(by_keys ? s.keys : s.rows, rank, ranks);
    const std::int64_t count = by_keys ? s.keys : s.rows, first = s.keys - s.rows;
    for (std::int64_t i = 0; i < shard.local_len(count); ++i) {
      const std::int64_t position = shard.position(i, count);
      own +=
          static_cast<double>(by_keys ? s.keys - std::max(first, position) : first + position + 1);
    }
  }
  return own;
}

TEST(Forecast, DocumentsAreDealtOutOneByOne) {
  const std::vector<SequenceSize> batch = {{1, 1},     {7, 7},       {130, 130},    {1000, 1000},
                                           {400, 900}, {5000, 5000}, {30000, 30000}};
  for (const int ranks : {2, 4, 8})
    for (const Layout layout :
         {Layout::contiguous, Layout::zigzag, Layout::striped, Layout::interleaved})
      for (const std::size_t documents : {std::size_t{3}, std::size_t{6}, batch.size()}) {
        RunSize size{.sequences = static_cast<double>(documents)};
        size.each.assign(batch.begin(), batch.begin() + documents);
        for (const SequenceSize& s : size.each) {
          size.tokens += static_cast<double>(s.rows);
          size.keys += static_cast<double>(s.keys);
        }
        size.most_tokens = size.tokens / ranks;
        Machine machine = built_in_machine(Device::host);
        machine.call_s = 0;
        machine.key_bytes_per_s = 1e30;
        const Options options = prefill(36000, ranks, layout);
        const auto all = forecast(options, {.ranks = ranks}, size, machine);
        for (const char* name : {"gather-kv", "gather-states"}) {
          const Forecast& f = of(all, name);
          double most = 0, sum = 0;
          for (int rank = 0; rank < ranks; ++rank) {
            const double own =
                pairs(layout, size.each, name == std::string("gather-states"), rank, ranks);
            most = std::max(most, own);
            sum += own;
          }
          EXPECT_NEAR(f.balance, most * ranks / sum, 0.01 * f.balance)
              << name << " " << longspan::name(layout) << " ranks " << ranks << " " << documents;
          const double flops = 2.0 * 8 * 128 * sum;
          EXPECT_NEAR(f.attend, f.balance * f.cost.work * flops / machine.flops_per_s,
                      0.01 * f.attend);
        }
      }
}

TEST(Forecast, DocumentsOfOneLengthAreABatchThatIsAlike) {
  const Options options = prefill(3000, 4, Layout::zigzag);
  const Machine machine = built_in_machine(Device::host);
  RunSize size{.tokens = 15000, .most_tokens = 3752, .keys = 15000, .sequences = 5};
  const auto alike = forecast(options, {.ranks = 4}, size, machine);
  size.each.assign(5, {3000, 3000});
  const auto listed = forecast(options, {.ranks = 4}, size, machine);
  for (std::size_t i = 0; i < alike.size(); ++i) {
    EXPECT_EQ(alike[i].balance, listed[i].balance);
    EXPECT_EQ(alike[i].seconds(), listed[i].seconds());
  }
}

TEST(Forecast, OfThousandsOfLengthsSomeStandForTheOthers) {
  const Options options = prefill(20000, 8, Layout::contiguous);
  RunSize size{.sequences = 10000};
  double exact = 0, most = 0;
  for (std::int64_t n = 1; n <= 10000; ++n) {
    size.each.push_back({n, n});
    exact += 0.5 * static_cast<double>(n * (n + 1));
  }
  for (int rank = 0; rank < 8; ++rank)
    most = std::max(most, pairs(Layout::contiguous, size.each, false, rank, 8));
  size.tokens = size.keys = 10000.0 * 10001 / 2;
  Machine machine = built_in_machine(Device::host);
  machine.call_s = 0;
  machine.key_bytes_per_s = 1e30;
  const auto all = forecast(options, {.ranks = 8}, size, machine);
  const Forecast& f = of(all, "gather-kv");
  EXPECT_NEAR(f.balance, most * 8 / exact, 0.01);
  EXPECT_NEAR(f.attend, f.balance * f.cost.work * 2.0 * 8 * 128 * exact / machine.flops_per_s,
              0.01 * f.attend);
}

TEST(Forecast, AWindowLeavesLessWork) {
  Options options = prefill(65536, 2, Layout::zigzag);
  const double all = of(forecast_of(options, 2), "gather-kv").attend;
  options.mask.window = 1024;
  EXPECT_LT(of(forecast_of(options, 2), "gather-kv").attend, all / 4);
}

TEST(Forecast, FarRanksAreHeardByTheLinkBetweenNodes) {
  const Options options = prefill(65536, 16, Layout::zigzag);
  const RunSize size = largest_run(options, 16);
  const Machine machine = built_in_machine(Device::cuda);
  const auto near = forecast(options, {.ranks = 16}, size, machine);
  const auto far = forecast(options, {.ranks = 16, .ranks_per_node = 8}, size, machine);
  for (std::size_t i = 0; i < near.size(); ++i) {
    if (!near[i].refusal.empty()) continue;
    EXPECT_EQ(near[i].attend, far[i].attend);
    EXPECT_GT(far[i].exchange + far[i].hidden, 3 * (near[i].exchange + near[i].hidden));
  }
}

TEST(Forecast, TwoLevelsBringFromOtherNodesThePartOfARanksHeads) {
  constexpr int kRanks = 16, kPerNode = 8;
  const Options options = prefill(65536, kRanks, Layout::zigzag);
  const RunSize size = largest_run(options, kRanks);
  const Machine machine = built_in_machine(Device::cuda);
  const auto all = forecast(options, {.ranks = kRanks, .ranks_per_node = kPerNode}, size, machine);
  const Forecast &one = of(all, "ring-kv"), &two = of(all, "heads+ring-kv");
  ASSERT_EQ(two.refusal, "");
  EXPECT_EQ(one.strategy->levels, 1);
  EXPECT_EQ(two.strategy->levels, 2);
  // 15/16 of all keys, 8/15 of them from the other node; and half of them, of one head in eight.
  EXPECT_NEAR(one.far_bytes / two.far_bytes, 8, 0.01);
  EXPECT_LT(two.cost.received_bytes, one.cost.received_bytes);
  EXPECT_LT(two.exchange, one.exchange + one.hidden);
  EXPECT_NEAR(two.balance, 1, 0.03);
  // Of contiguous shares of two nodes the last one has 3/4 of the pairs.
  const Options uneven = prefill(65536, kRanks, Layout::contiguous);
  const auto contiguous =
      forecast(uneven, {.ranks = kRanks, .ranks_per_node = kPerNode}, size, machine);
  EXPECT_NEAR(of(contiguous, "heads+ring-kv").balance, 1.5, 0.01);
}

TEST(Forecast, TwoLevelsAreNothingForOneNode) {
  const Options options = prefill(65536, 8, Layout::zigzag);
  const RunSize size = largest_run(options, 8);
  const Machine machine = built_in_machine(Device::cuda);
  for (const Topology& topology :
       {Topology{8, 0}, Topology{8, 8}, Topology{8, 1}, Topology{8, 3}, Topology{1, 0}})
    for (const Forecast& f : forecast(options, topology, size, machine))
      EXPECT_EQ(f.refusal.empty(), f.strategy->levels == 1)
          << f.strategy->name << " on " << topology.ranks << " by " << topology.ranks_per_node;
}

TEST(Forecast, TakesThousandsOfRanks) {
  const Options options = prefill(1'000'000'000, 4096, Layout::zigzag);
  for (const Forecast& f : forecast_of(options, 4096)) {
    if (!f.refusal.empty()) continue;
    EXPECT_GT(f.seconds(), 0) << f.strategy->name;
    EXPECT_NEAR(f.balance, 1, 0.05) << f.strategy->name;
  }
}

TEST(Choose, AutoTakesTheShortestForecast) {
  for (const int ranks : {2, 3, 8})
    for (const std::int64_t keys : {500, 20000, 1000000}) {
      const Options options = prefill(keys, ranks, Layout::zigzag);
      const Machine machine = built_in_machine(Device::cuda);
      const StrategyInfo& chosen = choose_strategy(options, ranks, machine);
      const auto all = forecast(options, {.ranks = ranks}, largest_run(options, ranks), machine);
      for (const Forecast& f : all) {
        if (!f.refusal.empty() || !f.reservation.empty()) continue;
        EXPECT_LE(of(all, chosen.name).seconds(), f.seconds()) << f.strategy->name;
      }
    }
}

TEST(Choose, DecodeOverLongCachesMovesStates) {
  const Options options{.heads = 32,
                        .kv_heads = 8,
                        .head_dim = 128,
                        .limits = {.max_tokens = 1, .max_kv_len = 131072}};
  for (const Device device : {Device::host, Device::cuda})
    EXPECT_STREQ(choose_strategy(options, 4, built_in_machine(device)).name, "gather-states");
}

TEST(Choose, WithoutALengthNothingIsPredicted) {
  Options options = prefill(1 << 20, 4, Layout::zigzag);
  options.limits.max_kv_len = 0;
  EXPECT_STREQ(choose_strategy(options, 4, built_in_machine(Device::cuda)).name, "gather-states");
}

TEST(Choose, AMemoryLimitIsPartOfTheChoice) {
  Options options = prefill(65536, 4, Layout::zigzag);
  const Machine machine = built_in_machine(Device::cuda);
  const auto all = forecast(options, {.ranks = 4}, largest_run(options, 4), machine);
  double least = 1e300;
  for (const Forecast& f : all)
    if (f.refusal.empty() && f.reservation.empty()) least = std::min(least, f.cost.workspace_bytes);
  options.limits.max_workspace = static_cast<std::int64_t>(least) + 1;
  const StrategyInfo& chosen = choose_strategy(options, 4, machine);
  EXPECT_LE(of(all, chosen.name).cost.workspace_bytes, least);
  options.limits.max_workspace = static_cast<std::int64_t>(least) - 1;
  EXPECT_THAT([&] { choose_strategy(options, 4, machine); },
              ThrowsMessage<Unsupported>(HasSubstr("max_workspace")));
}

TEST(Choose, AnUnknownNameIsRefusedWithTheKnownOnes) {
  const Options options{.strategy = "ring"};
  EXPECT_THAT([&] { choose_strategy(options, 2, built_in_machine(Device::host)); },
              ThrowsMessage<Unsupported>(HasSubstr("gather-kv")));
}

}  // namespace
}  // namespace longspan
