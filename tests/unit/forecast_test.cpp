// What is predicted of a run, and what "auto" makes of it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

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
