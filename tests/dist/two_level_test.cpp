// Strategies of two levels on nodes that are declared: results whole and by rows, uneven heads,
// what they refuse, and that ranks which never meet compare their arguments. Random cases of them
// are in strategies_test.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <mpi.h>

#include <string>
#include <vector>

#include "comm/transport.hpp"
#include "longspan/longspan.hpp"
#include "tests/dist/head_shapes.hpp"
#include "tests/dist/layer_run.hpp"
#include "tests/dist/node_sizes.hpp"
#include "tests/dist/refused_layer.hpp"
#include "tests/dist/world.hpp"
#include "tests/support/message.hpp"

namespace longspan::tests {
namespace {

std::vector<std::string> strategies_of_two_levels() {
  std::vector<std::string> names;
  for (const StrategyInfo& info : strategies())
    if (std::string(info.name).find('+') != std::string::npos) names.emplace_back(info.name);
  return names;
}

bool wants_sharded_queries(const std::string& strategy) {
  return strategy.find("ring") != std::string::npos;
}

Options options_of(const std::string& strategy, const Problem& problem, const Communicator& world,
                   int per_node) {
  Options options = options_for(problem, world);
  options.strategy = strategy;
  options.ranks_per_node = per_node;
  options.limits.max_kv_len = 1001;
  return options;
}

class TwoLevels : public ::testing::Test {
 protected:
  void SetUp() override {
    if (node_sizes(test_world().size()).empty())
      GTEST_SKIP() << "these ranks make no nodes of several ranks";
  }
};

TEST_F(TwoLevels, GiveResultsWholeAndByRows) {
  const Communicator world = test_world();
  const std::uint64_t seed = shared_seed(world);
  for (const int per_node : node_sizes(world.size()))
    for (const std::string& strategy : strategies_of_two_levels())
      for (const Shape& shape : in_time(shapes_of_heads())) {
        const Problem problem(shape, seed);
        const Options options = options_of(strategy, problem, world, per_node);
        for (const Layout layout :
             {Layout::contiguous, Layout::zigzag, Layout::striped, Layout::interleaved}) {
          SCOPED_TRACE(strategy + " nodes of " + std::to_string(per_node) + " " + name(layout) +
                       " heads " + std::to_string(shape.heads) + " seed " + std::to_string(seed));
          const Shard keys{layout, world.rank(), world.size(), shape.kv_lens[0], 16};
          const Shard rows{layout, world.rank(), world.size(), problem.tokens, 3};
          expect_exact(problem, run(world, problem, keys, options, rows), own_rows(problem, rows));
          if (wants_sharded_queries(strategy)) continue;
          expect_exact(problem, run(world, problem, keys, options), all_rows(problem));
          if (strategy == "heads+gather-kv") continue;  // all rows, or its own
          expect_exact(problem, run(world, problem, keys, options, std::nullopt, rows),
                       own_rows(problem, rows));
        }
      }
}

TEST_F(TwoLevels, ShareTheirCommunicators) {
  const Communicator world = test_world();
  const int per_node = node_sizes(world.size()).front();
  const comm::Levels& levels = comm::transport_of(world).levels(per_node);
  EXPECT_EQ(levels.node->size(), per_node);
  EXPECT_EQ(levels.node->rank(), world.rank() % per_node);
  EXPECT_EQ(levels.nodes->size(), world.size() / per_node);
  EXPECT_EQ(levels.nodes->rank(), world.rank() / per_node);
  EXPECT_EQ(&comm::transport_of(world).levels(per_node), &levels);
}

TEST_F(TwoLevels, AreRefusedByNameWhereTheyCannotServe) {
  const Communicator world = test_world();
  const Options good{.heads = 8,
                     .kv_heads = 8,
                     .dtypes = {.compute = DType::fp32},
                     .limits = {.max_kv_len = 10},
                     .strategy = "heads+gather-states",
                     .ranks_per_node = node_sizes(world.size()).front()};
  EXPECT_STREQ(Attention(world, good).strategy().name, "heads+gather-states");
  const auto refused = [&](const Options& options, const char* word) {
    expect_refused_layer(world, options, word);
  };
  Options bad = good;
  bad.limits.max_kv_len = 0;
  refused(bad, "max_kv_len");
  bad = good;
  bad.heads = bad.kv_heads = 1;
  refused(bad, "1 heads are fewer than");
  bad = good;
  bad.exchange = Exchange::peer_buffers;
  refused(bad, "peer-buffers");
  bad = good;
  bad.ranks_per_node = world.size() + 1;
  refused(bad, "do not divide");
  bad.ranks_per_node = 1;
  refused(bad, "a node of its own");
  bad.ranks_per_node = world.size();
  refused(bad, "all ranks are of one node");
  bad.ranks_per_node = 0;  // those of this machine
  refused(bad, "all ranks are of one node");
  bad = good;
  bad.keys.layout = Layout::ranges;
  refused(bad, "not by a table");
  bad = good;
  bad.results.part = ResultPart::heads;
  refused(bad, "results by heads");
  bad = good;
  bad.strategy = "heads+ring-kv";
  refused(bad, "between nodes, it shares the work by rows");
}

/// The rank with other arguments is the last one, with which rank 0 shares neither heads nor keys.
TEST_F(TwoLevels, CompareWhatRanksMeanWhoNeverMeet) {
  const bool last = test_world().rank() == test_world().size() - 1;
  for (const std::string& strategy : strategies_of_two_levels())
    for (const bool by_sinks : {false, true}) {
      const Communicator world = test_world();  // a run with different arguments ends its own
      const std::int32_t count = !by_sinks && last ? 99 : 100;
      const Problem problem(
          {.heads = 8, .q_lens = {30}, .kv_lens = {count}, .sinks = by_sinks && last},
          shared_seed(world));
      const Shard rows = Shard::striped(30, world.rank(), world.size());
      try {
        run(world, problem, Shard::zigzag(count, world.rank(), world.size()),
            options_of(strategy, problem, world, node_sizes(world.size()).front()), rows);
        FAIL() << "ranks disagreed and nobody said so";
      } catch (const UsageError& error) {
        EXPECT_THAT(error.what(),
                    ::testing::HasSubstr(by_sinks ? "'sinks' differs between ranks"
                                                  : "'total_keys' differs between ranks"));
      }
      // On GPUs exchanges of other lengths wait for the deadline, and only in the node that has
      // them.
      MPI_Barrier(MPI_COMM_WORLD);
    }
}

}  // namespace
}  // namespace longspan::tests
