// The predictions for a run, and the choice of "auto".
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
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

/// Prefill of as many rows as keys, with queries and keys in the same layout.
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
    // The last of P contiguous shares of the rows sees (2 P - 1) / P^2 of all tiles, and the first
    // share of the keys is seen by as many.
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

/// The tiles of 128 packed rows by 128 keys of a rank, counted one by one: of its own keys and all
/// rows, or of its own rows and all keys.
double tiles(const Sharding& dealt, const Mask& mask, const std::vector<SequenceSize>& batch,
             bool by_keys, int group, int rank, int ranks) {
  double all = 0;
  for (const SequenceSize& s : batch) {
    const std::int64_t count = by_keys ? s.keys : s.rows;
    const std::int64_t first = mask.alignment == Alignment::upper_left ? 0 : s.keys - s.rows;
    const Shard shard = dealt.resolve(count, rank, ranks);
    std::vector<std::int64_t> own;
    for (std::int64_t i = 0; i < shard.local_len(count); ++i)
      own.push_back(shard.position(i, count));
    const std::int64_t rows = by_keys ? s.rows : std::ssize(own);
    std::int64_t row_tile = -1;
    std::vector<bool> seen;  // tiles of keys, by some row of the tile
    const auto count_seen = [&] {
      all += static_cast<double>(std::count(seen.begin(), seen.end(), true));
    };
    for (std::int64_t packed = 0; packed < rows * group; ++packed) {
      if (packed / 128 != row_tile) {
        count_seen();
        row_tile = packed / 128;
        seen.assign(static_cast<std::size_t>(s.keys / 128 + 1), false);
      }
      const std::int64_t row = packed / group;
      const std::int64_t at = first + (by_keys ? row : own[static_cast<std::size_t>(row)]);
      const Interval late = mask.visible(at, s.keys), early{0, std::min(mask.prefix, late.end)};
      for (Interval keys : {early, late}) {
        if (by_keys) {
          const auto local = [&](std::int64_t key) {
            return std::lower_bound(own.begin(), own.end(), key) - own.begin();
          };
          keys = {local(keys.begin), local(keys.end)};
        }
        for (std::int64_t tile = keys.begin / 128; tile * 128 < keys.end; ++tile)
          if (keys.begin < keys.end) seen[static_cast<std::size_t>(tile)] = true;
      }
    }
    count_seen();
  }
  return all;
}

/// The most tiles of a rank over the mean.
double balance(const Sharding& dealt, const Mask& mask, const std::vector<SequenceSize>& batch,
               bool by_keys, int group, int ranks) {
  double most = 0, sum = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    const double own = tiles(dealt, mask, batch, by_keys, group, rank, ranks);
    most = std::max(most, own);
    sum += own;
  }
  return sum > 0 ? most * ranks / sum : 1;
}

/// The visible pairs of a causal batch.
double pairs(const std::vector<SequenceSize>& batch) {
  double all = 0;
  for (const SequenceSize& s : batch)
    all += static_cast<double>(s.rows) * static_cast<double>(2 * s.keys - s.rows + 1) / 2;
  return all;
}

RunSize size_of(const std::vector<SequenceSize>& batch, int ranks) {
  RunSize size{.sequences = static_cast<double>(batch.size()), .each = batch};
  for (const SequenceSize& s : batch) {
    size.tokens += static_cast<double>(s.rows);
    size.keys += static_cast<double>(s.keys);
  }
  size.most_tokens = size.tokens / ranks;
  return size;
}

TEST(Forecast, TheBalanceIsOfVisibleTiles) {
  std::mt19937_64 random(20);
  const auto below = [&](std::int64_t n) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(n));
  };
  for (int turn = 0; turn < 100; ++turn) {
    const int ranks = static_cast<int>(2 + below(7)), group = static_cast<int>(1 + below(9));
    Options options = prefill(4000, ranks, Layout::contiguous);
    options.heads = options.kv_heads * group;
    Mask& mask = options.mask;
    mask.causal = below(2) == 0;
    if (below(2) == 0) mask.window = 1 + below(below(2) == 0 ? 300 : 3000);
    if (below(3) == 0) mask.right = below(500);
    if (below(3) == 0) mask.alignment = Alignment::upper_left;
    if (below(3) == 0) mask.chunk = 1 + below(below(2) == 0 ? 300 : 3000);
    if (mask.chunk > 0) mask.lookback = below(3);
    if (below(8) == 0) mask.prefix = below(1000);
    std::vector<SequenceSize> batch(static_cast<std::size_t>(1 + below(4)));
    for (SequenceSize& s : batch) {
      s.keys = below(3) == 0 ? below(300) : below(4000);
      s.rows = below(3) == 0 ? s.keys : below(s.keys + 1);
      if (mask.alignment == Alignment::upper_left && below(2) == 0) s.rows = below(4000);
    }
    for (const Sharding dealt :
         {Sharding{Layout::contiguous}, Sharding{Layout::zigzag}, Sharding{Layout::striped},
          Sharding{Layout::interleaved, 128}, Sharding{Layout::interleaved, 1 + below(300)}}) {
      SCOPED_TRACE(std::to_string(turn) + " " + name(dealt.layout) + " ranks " +
                   std::to_string(ranks) + " group " + std::to_string(group) + " causal " +
                   std::to_string(mask.causal) + " window " + std::to_string(mask.window) +
                   " right " + std::to_string(mask.right) + " chunk " + std::to_string(mask.chunk) +
                   " prefix " + std::to_string(mask.prefix));
      options.keys = dealt;
      options.queries = dealt;
      const auto all = forecast(options, {.ranks = ranks}, size_of(batch, ranks),
                                built_in_machine(Device::host));
      EXPECT_NEAR(of(all, "gather-kv").balance, balance(dealt, mask, batch, false, group, ranks),
                  1e-12);
      EXPECT_NEAR(of(all, "gather-states").balance, balance(dealt, mask, batch, true, group, ranks),
                  1e-12);
    }
  }
}

/// Of more tiles than are counted, some represent the others.
TEST(Forecast, TheBalanceOfLongSharesIsNearThatOfAllTiles) {
  constexpr std::int64_t kKeys = 3'000'000;
  for (const std::int64_t window : {std::int64_t{0}, std::int64_t{50'000}})
    for (const Layout layout : {Layout::contiguous, Layout::zigzag}) {
      Options options = prefill(kKeys, 2, layout);
      options.mask.window = window;
      const auto all = forecast_of(options, 2);
      // Rows of neighbouring tiles see nearly the same keys, so one row in each is enough.
      const auto sampled = [&](bool by_keys) {
        double most = 0, sum = 0;
        for (int rank = 0; rank < 2; ++rank) {
          const Shard shard = Sharding{layout}.resolve(kKeys, rank, 2);
          double own = 0;
          for (std::int64_t i = 0; i < shard.local_len(kKeys); i += 128) {
            const std::int64_t at = shard.position(i, kKeys);
            const std::int64_t reach = window > 0 ? window : kKeys;
            own += static_cast<double>(std::min(reach, by_keys ? kKeys - at : at + 1));
          }
          most = std::max(most, own);
          sum += own;
        }
        return most * 2 / sum;
      };
      EXPECT_NEAR(of(all, "gather-kv").balance, sampled(false), 0.002) << name(layout);
      EXPECT_NEAR(of(all, "gather-states").balance, sampled(true), 0.002) << name(layout);
    }
}

TEST(Forecast, DocumentsAreDealtOutOneByOne) {
  const std::vector<SequenceSize> batch = {{1, 1},     {7, 7},       {130, 130},    {1000, 1000},
                                           {400, 900}, {5000, 5000}, {30000, 30000}};
  for (const int ranks : {2, 4, 8})
    for (const Layout layout :
         {Layout::contiguous, Layout::zigzag, Layout::striped, Layout::interleaved})
      for (const std::size_t documents : {std::size_t{3}, std::size_t{6}, batch.size()}) {
        const RunSize size =
            size_of({batch.begin(), batch.begin() + static_cast<std::ptrdiff_t>(documents)}, ranks);
        Machine machine = built_in_machine(Device::host);
        machine.call_s = 0;
        machine.key_bytes_per_s = 1e30;
        const Options options = prefill(36000, ranks, layout);
        const auto all = forecast(options, {.ranks = ranks}, size, machine);
        for (const char* name : {"gather-kv", "gather-states"}) {
          const Forecast& f = of(all, name);
          const bool by_keys = name == std::string("gather-states");
          EXPECT_NEAR(f.balance, balance({layout}, options.mask, size.each, by_keys, 1, ranks),
                      0.01 * f.balance)
              << name << " " << longspan::name(layout) << " ranks " << ranks << " " << documents;
          const double flops = 2.0 * 8 * 128 * pairs(size.each);
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
  std::vector<SequenceSize> some;
  for (std::int64_t n = 1; n <= 10000; ++n) size.each.push_back({n, n});
  for (std::int64_t n = 7; n <= 10000; n += 13) some.push_back({n, n});
  const double exact = pairs(size.each);
  size.tokens = size.keys = 10000.0 * 10001 / 2;
  Machine machine = built_in_machine(Device::host);
  machine.call_s = 0;
  machine.key_bytes_per_s = 1e30;
  const auto all = forecast(options, {.ranks = 8}, size, machine);
  const Forecast& f = of(all, "gather-kv");
  EXPECT_NEAR(f.balance, balance({Layout::contiguous}, options.mask, some, false, 1, 8), 0.01);
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

/// Constants of two to four H100s where every run is launched by itself.
Machine gpus() {
  Machine machine = built_in_machine(Device::cuda);
  machine.call_s = 2.5e-5;
  machine.latency_s = 1e-4;
  machine.peer_latency_s = 1.5e-5;
  return machine;
}

/// Data that GPUs write into each other's buffers wait for no collective.
TEST(Forecast, PeerBuffersHaveALatencyOfTheirOwn) {
  Machine machine = gpus();
  machine.latency_s = 1;
  Options options = prefill(4096, 4, Layout::zigzag);
  const auto exchange = [&](const char* strategy) {
    return of(forecast(options, {.ranks = 4}, largest_run(options, 4), machine), strategy).exchange;
  };
  EXPECT_LT(exchange("ring-kv"), 1);
  EXPECT_LT(exchange("heads"), 1);
  EXPECT_LT(exchange("gather-kv"), 1);
  EXPECT_GT(exchange("gather-states"), 2);
  options.exchange = Exchange::gather;
  EXPECT_GT(exchange("gather-kv"), 2);
  EXPECT_GT(exchange("ring-kv"), 3);
  EXPECT_GT(exchange("heads"), 3);
  options.exchange = Exchange::automatic;
  options.queries = std::nullopt;
  options.limits.max_tokens = 1;
  EXPECT_LT(exchange("gather-states"), 1);
  options.limits.max_tokens = 4096;  // of more states than go through peer buffers
  EXPECT_GT(exchange("gather-states"), 1);
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
  // Of contiguous shares of two nodes the last one has 3/4 of the tiles.
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

TEST(Forecast, WhatMakesNoSenseIsRefusedByName) {
  const Options good = prefill(4096, 2, Layout::zigzag);
  const Machine machine = built_in_machine(Device::host);
  const RunSize size = largest_run(good, 2);
  const auto refused = [&](const char* says, const auto& change) {
    Options o = good;
    Topology topology{.ranks = 2};
    RunSize run = size;
    Machine m = machine;
    change(o, topology, run, m);
    EXPECT_THAT([&] { forecast(o, topology, run, m); }, ThrowsMessage<UsageError>(HasSubstr(says)));
  };
  EXPECT_NO_THROW(forecast(good, {.ranks = 2}, size, machine));
  using O = Options&;
  using T = Topology&;
  using R = RunSize&;
  using M = Machine&;
  refused("kv_heads 0", [](O o, T, R, M) { o.kv_heads = 0; });
  refused("there are 0 ranks", [](O, T t, R, M) { t.ranks = 0; });
  refused("ranks_per_node -1", [](O, T t, R, M) { t.ranks_per_node = -1; });
  refused("a run of nan tokens", [](O, T, R r, M) { r.tokens = NAN; });
  refused("a run of -1 keys", [](O, T, R r, M) { r.keys = -1; });
  refused("a run of 1e+18 tokens", [](O, T, R r, M) { r.tokens = 1e18; });
  refused("keys in a sequence (each)", [](O, T, R r, M) { r.each = {{1, -5}}; });
  refused("flops_per_s 0, which is not a rate from 1 to 1e30",
          [](O, T, R, M m) { m.flops_per_s = 0; });
  refused("key_bytes_per_s 1e-320, which is not a rate from 1 to 1e30",
          [](O, T, R, M m) { m.key_bytes_per_s = 1e-320; });
  refused("latency_s 1e+308, which is not a number of seconds from 1e-15 to 1e6, or 0",
          [](O, T, R, M m) { m.latency_s = 1e308; });
  refused("call_s -1", [](O, T, R, M m) { m.call_s = -1; });
  refused("overlap 2, which is not a number from 0 to 1", [](O, T, R, M m) { m.overlap = 2; });
  EXPECT_THAT([&] { largest_run(good, 0); },
              ThrowsMessage<UsageError>(HasSubstr("there are 0 ranks")));
  EXPECT_THAT([&] { choose_strategy(good, -1, machine); },
              ThrowsMessage<UsageError>(HasSubstr("there are -1 ranks")));
  EXPECT_THAT([&] { cost_of(good, 2, {.tokens = -1}); },
              ThrowsMessage<UsageError>(HasSubstr("a run of -1 tokens")));
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

/// Measured on H100s: 96 us for 4,096 tokens of 8/1 heads by gather-kv on two, and 344 us by
/// collectives. For the others bench/results/context_parallel-h200x2 and -h200x4 have the times.
TEST(Choose, ShortPrefillOnGpusGoesWithoutCollectives) {
  const auto choice = [](std::int64_t keys, int ranks, int heads, int kv_heads) {
    Options options = prefill(keys, ranks, Layout::zigzag);
    options.heads = heads;
    options.kv_heads = kv_heads;
    options.head_dim = 128;
    options.dtypes.compute = DType::bf16;
    return std::string(choose_strategy(options, ranks, gpus()).name);
  };
  EXPECT_EQ(choice(4096, 2, 8, 1), "gather-kv");
  EXPECT_EQ(choice(8192, 2, 16, 16), "gather-kv");
  EXPECT_EQ(choice(8192, 2, 32, 8), "gather-kv");
  EXPECT_EQ(choice(32768, 2, 32, 8), "gather-kv");
  EXPECT_EQ(choice(8192, 4, 16, 16), "heads");
  EXPECT_NE(choice(32768, 4, 16, 16), "gather-kv");  // 12 % slower than heads and ring-kv
  EXPECT_EQ(choice(8192, 4, 32, 8), "gather-kv");
  EXPECT_EQ(choice(32768, 4, 32, 8), "gather-kv");
}

/// Backward takes five products where forward takes two.
TEST(Forecast, ABackwardIsPartOfTheTime) {
  Options options = prefill(65536, 4, Layout::zigzag);
  const std::vector<Forecast> forward = forecast_of(options, 4);
  options.gradients = true;
  const std::vector<Forecast> both = forecast_of(options, 4);
  for (std::size_t i = 0; i < both.size(); ++i) {
    if (!both[i].refusal.empty()) continue;
    SCOPED_TRACE(both[i].strategy->name);
    EXPECT_DOUBLE_EQ(both[i].attend, forward[i].attend);
    EXPECT_DOUBLE_EQ(both[i].seconds() - both[i].backward, forward[i].seconds());
    EXPECT_NEAR(both[i].backward / both[i].attend, 2.5, 0.4);
    EXPECT_GT(both[i].cost.workspace_bytes, forward[i].cost.workspace_bytes);
  }
}

/// Between nodes, only what the ranks with the same heads send: keys, and their gradients in fp32.
TEST(Forecast, ABackwardOfTwoLevels) {
  constexpr int kRanks = 16, kPerNode = 8;
  Options options = prefill(65536, kRanks, Layout::zigzag);
  options.gradients = true;
  Machine machine = built_in_machine(Device::host);
  machine.node_link_bytes_per_s = machine.link_bytes_per_s / 100;
  const auto all = forecast(options, {.ranks = kRanks, .ranks_per_node = kPerNode},
                            largest_run(options, kRanks), machine);
  const Forecast &one = of(all, "ring-kv"), &two = of(all, "heads+ring-kv");
  ASSERT_EQ(two.refusal, "");
  const BackwardCost &near = one.cost.backward, &levels = two.cost.backward;
  EXPECT_NEAR(near.received_bytes * 8 / 15 / levels.far_bytes, 8, 0.01);
  EXPECT_GT(levels.received_bytes, levels.far_bytes);
  EXPECT_LT(levels.overlapped_bytes, levels.far_bytes);
  EXPECT_LT(two.backward, one.backward);
}

/// Few rows travel to many keys, and few keys to the rows.
TEST(Choose, TrainingMovesWhatIsSmaller) {
  const auto chosen = [](std::int64_t rows, std::int64_t keys, int kv_heads) {
    Options options = prefill(keys, 4, Layout::striped);
    options.kv_heads = kv_heads;
    options.limits.max_tokens = rows / 4;
    options.gradients = true;
    Machine slow_links = built_in_machine(Device::host);
    slow_links.link_bytes_per_s = 1e6;
    return std::string(choose_strategy(options, 4, slow_links).name);
  };
  const std::string few_rows = chosen(512, 65536, 8);
  EXPECT_TRUE(few_rows == "ring-q" || few_rows == "gather-states" || few_rows == "scatter-states")
      << few_rows;
  const std::string few_keys = chosen(8192, 8192, 1);
  EXPECT_TRUE(few_keys == "ring-kv" || few_keys == "gather-kv") << few_keys;
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
