// Every strategy of the registry, on every number of ranks, in random cases of all options of a
// layer, compared with float64. A strategy that does not support a case refuses it by name, on
// every rank. LONGSPAN_TEST_CASES is the number of cases (300), LONGSPAN_TEST_SEED repeats some.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>
#include <string>

#include "longspan/longspan.hpp"
#include "tests/dist/strategy_case.hpp"
#include "tests/dist/world.hpp"
#include "tests/support/message.hpp"
#include "tests/support/test_cases.hpp"

namespace longspan::tests {
namespace {

/// The error that roundings to the type may add to those of fp32. CPUs round the result, GPUs the
/// weights too.
::testing::AssertionResult is_close_in(const HostShape& shape, Device device,
                                       const HostProblem::Error& error) {
  const DType dtype = shape.dtype;
  const double rounding = dtype == DType::fp32 ? 0 : dtype == DType::fp16 ? 0x1p-11 : 0x1p-8;
  HostProblem::Error left = error;
  left.out -= device == Device::host ? rounding : 2 * rounding;
  if (shape.rope.dim > 0) {  // a rotated element that lies between two numbers may become either
    left.lse -= rounding;
    left.worst_lse -= rounding;
  }
  return is_close(left);
}

class Strategies : public ::testing::Test {
 protected:
  /// Runs the case by each strategy: its result, or the reason of its refusal, on all ranks alike.
  void try_all(const StrategyCase& c, std::uint32_t seed) {
    const Communicator world = test_world();
    HostProblem problem(c.shape, seed);
    for (const StrategyInfo& info : strategies()) {
      SCOPED_TRACE(std::string(info.name) + ": " + c.text());
      CaseRun run(world, c, problem);
      std::string refusal;
      Result own;
      try {
        own = run.run(run.options(info.name));
      } catch (const Unsupported& error) {
        refusal = error.what();
        EXPECT_THAT(refusal, ::testing::HasSubstr(info.name));
      } catch (const std::exception& error) {
        FAIL() << error.what();
      }
      for (const std::string& other : world.gather(refusal, "refusals"))
        ASSERT_EQ(other.empty(), refusal.empty()) << "refused on some ranks: " << refusal << other;
      (refusal.empty() ? taken_ : refused_)[info.name] += 1;
      if (!refusal.empty()) continue;
      const Result all = run.whole(own);
      if (world.rank() == 0) {
        EXPECT_TRUE(is_close_in(c.shape, world.device(),
                                problem.error(all, c.sinks ? &run.sinks : nullptr)));
      }
      // Whatever travels, a rank of gather-kv attends to whole sequences as one rank alone does. On
      // GPUs the order of long rows is that of the tiles.
      if (std::string(info.name) == "gather-kv" && world.size() > 1 &&
          world.device() == Device::host) {
        EXPECT_TRUE(all.same_bits(alone(c, problem))) << "not the bits of one rank alone";
      }
      if (!c.queries) {
        EXPECT_TRUE(own.same_bits(all)) << "replicated results differ between ranks";
      }
      if (HasFatalFailure()) return;
    }
  }

  /// By one rank that has everything.
  static Result alone(const StrategyCase& c, HostProblem& problem) {
    StrategyCase one = c;
    one.keys = {};
    one.queries.reset();
    one.grows = c.grows && c.shape.rope.dim > 0;  // the layer rotates the new keys
    CaseRun run(self(), one, problem);
    return run.run(run.options("auto"));
  }

  std::map<std::string, int> taken_, refused_;
};

TEST_F(Strategies, AgreeWithFloat64InWhateverTheyTake) {
  const Communicator world = test_world();
  const char* again = std::getenv("LONGSPAN_TEST_SEED");
  const std::uint64_t seed = again ? std::stoull(again) : shared_seed(world);
  const int cases = number_of_cases(300);
  if (world.rank() == 0) std::cout << "LONGSPAN_TEST_SEED=" << seed << "\n";
  for (int i = 0; i < cases && !HasFailure(); ++i) {
    Draw draw(seed + static_cast<std::uint64_t>(i), world.size());
    const StrategyCase c = draw.next();
    try_all(c, static_cast<std::uint32_t>(draw.random()()));
    if (HasFailure() && world.rank() == 0)
      std::cout << "repeat: LONGSPAN_TEST_CASES=1 LONGSPAN_TEST_SEED=" << seed + i << "\n";
  }
  if (world.rank() == 0)
    for (const StrategyInfo& info : strategies())
      std::cout << info.name << ": " << taken_[info.name] << " taken, " << refused_[info.name]
                << " refused\n";
}

/// The transports' counts are those of the table of strategies, over all ranks, where every key is
/// seen and all shares are even.
TEST(StrategyBytes, AreThoseOfTheTable) {
  const Communicator world = test_world();
  if (world.device() != Device::host)
    GTEST_SKIP() << "bytes are counted as they come on CPUs alone";
  const int ranks = world.size();
  for (const bool by_rows : {false, true})
    for (const StrategyInfo& info : strategies()) {
      SCOPED_TRACE(std::string(info.name) + (by_rows ? " by rows" : ""));
      StrategyCase c;
      c.shape.heads = c.shape.kv_heads = 8 * ranks;  // so that every rank can have its own
      c.shape.dim = 16;
      c.shape.query_len = {12 * ranks};
      c.shape.kv_len = {128 * ranks};
      if (by_rows) c.queries = Dealt{{Layout::striped}, {}, {}};
      if (ranks % 2 == 0 && ranks > 2) c.ranks_per_node = 2;
      HostProblem problem(c.shape, 1);
      CaseRun run(world, c, problem);
      const Options options = run.options(info.name);
      try {
        run.run(options);
      } catch (const Unsupported&) {
        continue;
      }
      const RunSize size{12.0 * ranks, by_rows ? 12.0 : 12.0 * ranks, 128.0 * ranks};
      double all = 0;
      for (const std::string& bytes : world.gather(std::to_string(run.received), "bytes"))
        all += std::stod(bytes);
      EXPECT_EQ(all / ranks, cost_of(options, ranks, size).received_bytes);
    }
}

/// Where only the device knows the lengths of a batch, ranks send as many keys as the limits allow,
/// and allocate memory for that many everywhere. The result is the same.
TEST(StrategyBytes, OfABatchFollowMaxTotalKeys) {
  const Communicator world = test_world();
  if (world.size() == 1) GTEST_SKIP() << "nothing travels";
  for (const char* name : {"ring-kv", "gather-kv", "heads"}) {
    SCOPED_TRACE(name);
    StrategyCase c;
    c.shape.heads = c.shape.kv_heads = 2 * world.size();
    c.shape.dim = 16;
    c.shape.query_len = {60, 40, 9};
    c.shape.kv_len = {700, 40, 9};
    c.keys = {{Layout::zigzag}, {}, {}};
    c.queries = Dealt{{Layout::zigzag}, {}, {}};
    HostProblem problem(c.shape, 1);
    CaseRun run(world, c, problem);
    Options options = run.options(name);
    const auto bytes = [&] {
      const Attention layer(world, options);
      return layer.workspace_bytes() + layer.exchange().peer_bytes;
    };
    options.limits.max_total_keys = 0;
    const Result most = run.run(options);
    const std::uint64_t received = run.received;
    const std::size_t memory = bytes();
    options.limits.max_total_keys = 749;
    EXPECT_TRUE(run.run(options).same_bits(most));
    EXPECT_LT(bytes(), memory);
    if (world.device() == Device::host)
      EXPECT_EQ(run.received, received);
    else
      EXPECT_LT(run.received, received / 2);
  }
}

/// Under a causal mask the first ranks of contiguous shares see nothing of the last ones: keys that
/// they do not see are not sent to them.
TEST(StrategyBytes, KeysThatNobodySeesDoNotTravel) {
  const Communicator world = test_world();
  if (world.device() != Device::host)
    GTEST_SKIP() << "bytes are counted as they come on CPUs alone";
  const int ranks = world.size();
  StrategyCase c;
  c.shape.heads = c.shape.kv_heads = 1;
  c.shape.dim = 16;
  c.shape.query_len = c.shape.kv_len = {128 * ranks};
  c.shape.mask.causal = true;
  c.queries = Dealt{};
  const auto received = [&](std::int64_t window) {
    c.shape.mask.window = window;
    HostProblem problem(c.shape, 1);
    CaseRun run(world, c, problem);
    const Result all = run.whole(run.run(run.options("ring-kv")));
    if (world.rank() == 0) {
      EXPECT_TRUE(is_close(problem.error(all)));
    }
    return run.received;
  };
  constexpr std::uint64_t kShare = 128 * 2 * 16 * 4;
  EXPECT_EQ(received(0), kShare * static_cast<std::uint64_t>(world.rank()));
  EXPECT_EQ(received(129), world.rank() == 0 ? 0 : kShare) << "a window reaches one rank back";
  EXPECT_EQ(received(1), 0u) << "every row sees its own key alone";
}

}  // namespace
}  // namespace longspan::tests
