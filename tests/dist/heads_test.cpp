// heads on every rank count: against float64, the bits of one rank alone, uneven numbers of heads,
// and what it refuses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "comm/transport.hpp"
#include "longspan/longspan.hpp"
#include "src/strategy/shared/head_shares.hpp"
#include "tests/dist/differing_run.hpp"
#include "tests/dist/head_shapes.hpp"
#include "tests/dist/layer_run.hpp"
#include "tests/dist/refused_layer.hpp"
#include "tests/dist/run_again.hpp"
#include "tests/dist/world.hpp"
#include "tests/support/message.hpp"

namespace longspan::tests {
namespace {

Options options_of(const char* strategy, const Problem& problem, const Communicator& world) {
  Options options = options_for(problem, world);
  options.strategy = strategy;
  options.limits.max_kv_len = 1001;
  return options;
}

/// And of more kv heads than any of them, in groups.
std::vector<Shape> all_shapes() {
  std::vector<Shape> all = shapes_of_heads();
  all.push_back(
      {.heads = 22, .kv_heads = 11, .dim = 8, .q_lens = {5}, .kv_lens = {513}, .softcap = 20.0f});
  return all;
}

std::string trace(const Problem& problem, std::uint64_t seed) {
  return std::to_string(problem.shape.heads) + " heads " + std::to_string(problem.shape.kv_heads) +
         " kv heads, rows " + std::to_string(problem.tokens) + " seed " + std::to_string(seed);
}

/// The bits of a rank that has everything.
Result alone(const Problem& problem) {
  const Communicator one = self(test_world().device());
  return run(one, problem, Shard::contiguous(problem.shape.kv_lens[0], 0, 1),
             options_of("gather-states", problem, one));
}

TEST(Heads, GivesTheWholeResultToEveryRank) {
  const Communicator world = test_world();
  const std::uint64_t seed = shared_seed(world);
  for (const Shape& shape : in_time(all_shapes())) {
    const Problem problem(shape, seed);
    SCOPED_TRACE(trace(problem, seed));
    const Result single = alone(problem);
    for (const Layout layout : {Layout::contiguous, Layout::striped, Layout::interleaved}) {
      const Shard keys{layout, world.rank(), world.size(), shape.kv_lens[0], 16};
      const Result found = run(world, problem, keys, options_of("heads", problem, world));
      expect_exact(problem, found, all_rows(problem));
      if (world.size() == 1) continue;  // an interleaved share has its own order
      EXPECT_EQ(found.out, single.out);
      EXPECT_EQ(found.lse, single.lse);
    }
  }
}

TEST(Heads, GivesTheRowsOfShardedQueriesAndOfResultsByRows) {
  const Communicator world = test_world();
  const std::uint64_t seed = shared_seed(world);
  for (const Shape& shape : in_time(all_shapes())) {
    const Problem problem(shape, seed);
    SCOPED_TRACE(trace(problem, seed));
    const Result single = alone(problem);
    for (const Layout layout :
         {Layout::contiguous, Layout::zigzag, Layout::striped, Layout::interleaved})
      for (const bool replicated : {false, true}) {
        SCOPED_TRACE(std::string(name(layout)) + (replicated ? ", replicated queries" : ""));
        const Shard keys = Shard::zigzag(shape.kv_lens[0], world.rank(), world.size());
        const Shard rows{layout, world.rank(), world.size(), problem.tokens, 3};
        const Options options = options_of("heads", problem, world);
        const Result found = replicated ? run(world, problem, keys, options, std::nullopt, rows)
                                        : run(world, problem, keys, options, rows);
        expect_exact(problem, found, own_rows(problem, rows));
        const Result part = part_of(problem, single, own_rows(problem, rows), {0, shape.heads});
        if (world.size() == 1) continue;
        EXPECT_EQ(found.out, part.out);
        EXPECT_EQ(found.lse, part.lse);
      }
  }
}

TEST(Heads, GivesResultsByHeadsWhereTheyAreItsOwn) {
  const Communicator world = test_world();
  const std::uint64_t seed = shared_seed(world);
  int given = 0;
  for (const Shape& shape : in_time(all_shapes())) {
    const Problem problem(shape, seed);
    SCOPED_TRACE(trace(problem, seed));
    Options options = options_of("heads", problem, world);
    options.results.part = ResultPart::heads;
    const Shard keys = Shard::zigzag(shape.kv_lens[0], world.rank(), world.size());
    if (!are_result_heads(shape.heads, shape.kv_heads, world.size())) {
      EXPECT_THROW(run(world, problem, keys, options), Unsupported);
      continue;
    }
    ++given;
    const Result found = run(world, problem, keys, options);
    const Result part = part_of(problem, alone(problem), all_rows(problem),
                                result_heads(shape.heads, world.rank(), world.size()));
    EXPECT_EQ(found.out, part.out);
    EXPECT_EQ(found.lse, part.lse);
  }
  EXPECT_GE(given, kSimulated ? 1 : 2);
}

Options of_zigzag(const Problem& problem, const Communicator& world) {
  Options options = options_of("heads", problem, world);
  options.keys = {Layout::zigzag};
  options.queries = Sharding{Layout::zigzag};
  return options;
}

/// Shapes of one sequence for kernels that begin before all rows and keys have come: several kv
/// heads of a rank, and one whose group is shared by ranks; fewer or more keys than rows, and a
/// window; no keys, and rows that see none.
bool begins_early(const Shape& shape) { return shape.q_lens[0] > 300; }
std::vector<Shape> shapes_that_begin_early(int ranks) {
  return {{.heads = 2 * ranks,
           .kv_heads = 2 * ranks,
           .dim = 128,
           .dtype = DType::bf16,
           .q_lens = {701},
           .kv_lens = {701},
           .mask = {.causal = true}},
          {.heads = 4 * ranks,
           .kv_heads = ranks,
           .dim = 64,
           .dtype = DType::fp16,
           .q_lens = {301},
           .kv_lens = {1000},
           .mask = {.causal = true, .window = 300},
           .sinks = true},
          {.heads = 2 * ranks,
           .kv_heads = ranks,
           .dim = 64,
           .dtype = DType::bf16,
           .q_lens = {302},
           .kv_lens = {0},
           .sinks = true},
          {.heads = ranks,
           .kv_heads = ranks,
           .dim = 96,
           .value_dim = 64,
           .dtype = DType::bf16,
           .q_lens = {700},
           .kv_lens = {200},
           .mask = {.causal = true}}};
}

/// GPUs that reach each other put rows in their places while they attend; elsewhere NCCL sends
/// them: the same bits.
TEST(Heads, GivesTheSameBitsEveryWay) {
  const Communicator world = test_world();
  if (world.device() == Device::host) GTEST_SKIP() << "rows have one way between CPUs";
  if (world.size() == 1) GTEST_SKIP() << "alone nothing has to travel";
  const Options probe{.head_dim = 64, .strategy = "gather-states"};
  const bool reach = Attention(world, probe).exchange().has_peer_buffers();
  const std::uint64_t seed = shared_seed(world);
  std::vector<Shape> shapes = all_shapes();
  for (const Shape& shape : shapes_that_begin_early(world.size())) shapes.push_back(shape);
  for (const Shape& shape : shapes) {
    const Problem problem(shape, seed);
    SCOPED_TRACE(trace(problem, seed));
    for (const Layout layout : {Layout::zigzag, Layout::contiguous}) {
      const Shard keys{layout, world.rank(), world.size(), shape.kv_lens[0]};
      const Shard rows{Layout::zigzag, world.rank(), world.size(), shape.q_lens[0]};
      Options options = of_zigzag(problem, world);
      options.invariant = options.invariant && !begins_early(shape);
      const ExchangeInfo exchange = Attention(world, options).exchange();
      EXPECT_EQ(exchange.has_peer_buffers(), reach);
      EXPECT_EQ(exchange.peer_bytes > 0, reach);
      const Result by_puts = run(world, problem, keys, options, rows);
      options.exchange = Exchange::gather;
      EXPECT_EQ(Attention(world, options).exchange().by, Exchange::gather);
      const Result by_nccl = run(world, problem, keys, options, rows);
      EXPECT_EQ(by_puts.out, by_nccl.out);
      EXPECT_EQ(by_puts.lse, by_nccl.lse);
      expect_exact(problem, by_puts, own_rows(problem, rows));
    }
  }
}

/// Repeatedly, by itself and as a graph, with other rows: nothing of an earlier run is left in
/// memory that the peers write.
TEST(Heads, RunsAgainWithOtherRows) {
  const Communicator world = test_world();
  constexpr int kHeads = 8;
  if (kHeads < world.size()) GTEST_SKIP() << "more ranks than heads";
  const std::uint64_t seed = shared_seed(world);
  for (const DType dtype : {DType::fp32, DType::bf16}) {  // of bf16 attention begins early
    const std::int32_t rows = dtype == DType::bf16 ? 600 : 150;
    const Shape shape{.heads = kHeads,
                      .kv_heads = kHeads,
                      .dim = 64,
                      .dtype = dtype,
                      .q_lens = {rows},
                      .kv_lens = {rows},
                      .mask = {.causal = true}};
    Options options = of_zigzag(Problem(shape, seed), world);
    options.invariant = false;
    options.limits = {.max_tokens = Shard::zigzag(rows, 0, world.size()).max_local_len(rows),
                      .max_kv_len = rows};
    expect_right_again_and_again(world, shape, options, seed,
                                 {true, true, false, false, true, true, false, false});
  }
}

/// Every head has one rank, groups are even on each rank, and no rank has none.
TEST(HeadShares, AreWholeAndOfEvenGroups) {
  for (int group = 1; group <= 9; ++group)
    for (int kv_heads = 1; kv_heads <= 9; ++kv_heads)
      for (int ranks = 1; ranks <= group * kv_heads; ++ranks) {
        int next = 0;
        for (int rank = 0; rank < ranks; ++rank) {
          const HeadShare own = head_share(group * kv_heads, kv_heads, rank, ranks);
          ASSERT_EQ(own.query.begin, next);
          ASSERT_GE(own.query.size(), 1);
          ASSERT_EQ(own.query.size() % own.kv.size(), 0);
          const int local = own.query.size() / own.kv.size();
          for (int h = own.query.begin; h < own.query.end; ++h)
            ASSERT_EQ(own.kv.begin + (h - own.query.begin) / local, h / group);
          next = own.query.end;
        }
        ASSERT_EQ(next, group * kv_heads);
      }
}

TEST(Heads, ReceivesWhatItsCostSays) {
  const Communicator world = test_world();
  const int ranks = world.size();
  const std::int64_t rows = 4 * std::int64_t{ranks} + 1;
  const Problem problem(
      {.heads = 14, .kv_heads = 2, .q_lens = {static_cast<std::int32_t>(rows)}, .kv_lens = {900}},
      shared_seed(world));
  const Shard striped = Shard::striped(rows, world.rank(), ranks);
  const Shard keys = Shard::striped(900, world.rank(), ranks);
  const RunSize size{1.0 * rows, 1.0 * striped.max_local_len(rows), 900};
  for (int kind = 0; kind < 3; ++kind) {
    Options options = options_of("heads", problem, world);
    const comm::Transport& comm = comm::transport_of(world);
    const std::uint64_t before = comm.received_bytes();
    std::optional<Shard> queries, results;
    if (kind == 1) queries = striped;
    if (kind == 2) results = striped;
    options.exchange = Exchange::gather;  // equal slots; only the rows that ranks put
    run(world, problem, keys, options, queries, results);
    options.keys = {Layout::striped};
    if (kind == 1) options.queries = Sharding{Layout::striped};
    if (kind == 2) options.results = {ResultPart::rows, {Layout::striped}};
    EXPECT_EQ(static_cast<double>(comm.received_bytes() - before),
              cost_of(options, ranks, size).received_bytes);
  }
}

TEST(Heads, RefusesByNameWhatAnotherStrategyCould) {
  const Communicator world = test_world();
  if (world.size() == 1) GTEST_SKIP() << "alone nothing has to travel";
  const Options good{.heads = 8,
                     .kv_heads = 8,
                     .dtypes = {.compute = DType::fp32},
                     .limits = {.max_kv_len = 10},
                     .strategy = "heads"};
  EXPECT_STREQ(Attention(world, good).strategy().name, "heads");
  const auto refused = [&](const Options& options, const char* word) {
    expect_refused_layer(world, options, word);
  };
  Options bad = good;
  bad.limits.max_kv_len = 0;
  refused(bad, "max_kv_len");
  bad.limits.max_kv_len = bad.limits.max_batch = std::numeric_limits<int>::max();
  refused(bad, "max_total_keys");
  bad = good;
  bad.heads = bad.kv_heads = 1;
  refused(bad, "1 heads are fewer than");
  bad = good;
  bad.exchange = Exchange::peer_buffers_apart;
  refused(bad, "peer-buffers-apart");
}

TEST(Heads, ComparesWhatRanksMean) {
  if (test_world().size() == 1) GTEST_SKIP() << "one rank cannot disagree";
  const bool last = test_world().rank() == test_world().size() - 1;
  const auto refused = [&](bool sharded, std::int32_t keys, bool sinks, const char* text) {
    const Communicator world = test_world();  // a run with different arguments ends its own
    const Problem problem({.heads = 8, .q_lens = {30}, .kv_lens = {keys}, .sinks = sinks},
                          shared_seed(world));
    std::optional<Shard> rows;
    if (sharded) rows = Shard::striped(30, world.rank(), world.size());
    try {
      run(world, problem, Shard::zigzag(keys, world.rank(), world.size()),
          options_of("heads", problem, world), rows);
      FAIL() << "ranks disagreed and nobody said so";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr(text));
    }
  };
  for (const bool sharded : {false, true}) {
    refused(sharded, 100, last, "'sinks' differs between ranks");
    refused(sharded, last ? 99 : 100, false, "'total_keys' differs between ranks");
  }
}

TEST(Heads, ComparesWhatRanksMeanWhereTheKernelBeginsEarly) {
  expect_what_differs_is_named("heads");
}

}  // namespace
}  // namespace longspan::tests
