// scatter-states on every rank count: against float64, the bits of gather-states, for any part of
// the result, and what it refuses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "comm/transport.hpp"
#include "longspan/longspan.hpp"
#include "tests/dist/layer_run.hpp"
#include "tests/dist/world.hpp"
#include "tests/support/message.hpp"

namespace longspan::tests {
namespace {

Options options_of(const char* strategy, const Problem& problem, const Communicator& world) {
  Options options = options_for(problem, world);
  options.strategy = strategy;
  return options;
}

HeadRange all_heads(const Problem& problem) { return {0, problem.shape.heads}; }

/// Has more rows on the first rank than on all others, and none on the last.
std::vector<std::int64_t> uneven_ranges(std::int64_t length, int ranks) {
  std::vector<std::int64_t> table{0};
  for (int r = 1; r <= ranks; ++r)
    table.push_back(r >= ranks - 1 ? length : std::min(length, length / 2 + r));
  return table;
}

/// Rows of one rank dealt out in turn from the back, then -1 up to `entries`.
std::vector<std::int64_t> backwards(std::int64_t length, int rank, int ranks,
                                    std::int64_t entries) {
  std::vector<std::int64_t> table;
  for (std::int64_t row = length - 1 - rank; row >= 0; row -= ranks) table.push_back(row);
  table.resize(static_cast<std::size_t>(entries), -1);
  return table;
}

/// Calls test(shard) with the rows of a batch, or of one sequence, dealt out in every layout.
/// `most` is the number of entries of a listed table.
template <class Test>
void for_layouts(const Problem& problem, const Communicator& world, std::int64_t most,
                 const Test& test) {
  const int rank = world.rank(), ranks = world.size();
  const std::int64_t rows = problem.tokens;
  for (Layout layout : {Layout::contiguous, Layout::zigzag, Layout::striped, Layout::interleaved}) {
    SCOPED_TRACE(name(layout));
    test(Shard{layout, rank, ranks, rows, 3});
  }
  if (problem.batch() > 1 || world.device() != Device::host) return;
  SCOPED_TRACE("table");
  const std::vector<std::int64_t> ranges = uneven_ranges(rows, ranks);
  test(Shard::ranges(rows, rank, ranks, ranges.data()));
  const std::vector<std::int64_t> listed = backwards(rows, rank, ranks, most);
  test(Shard::at_positions(rows, rank, ranks, listed.data(), (rows - rank + ranks - 1) / ranks));
}

std::string trace(const Problem& problem, std::uint64_t seed) {
  return "rows " + std::to_string(problem.tokens) + " kv " +
         std::to_string(problem.shape.kv_lens[0]) + " dim " + std::to_string(problem.shape.dim) +
         " seed " + std::to_string(seed);
}

Shard keys_of(const Communicator& world, std::int64_t length) {
  return Shard::zigzag(length, world.rank(), world.size());
}

TEST(ScatterStates, GivesTheWholeResultToEveryRank) {
  const Communicator world = test_world();
  const std::uint64_t seed = shared_seed(world);
  for (const Shape& shape : in_time(shapes())) {
    const Problem problem(shape, seed);
    SCOPED_TRACE(trace(problem, seed));
    for (Layout layout : {Layout::contiguous, Layout::striped, Layout::interleaved}) {
      SCOPED_TRACE(name(layout));
      const Shard keys{layout, world.rank(), world.size(), shape.kv_lens[0], 16};
      const Result gathered =
          run(world, problem, keys, options_of("gather-states", problem, world));
      const Result found = run(world, problem, keys, options_of("scatter-states", problem, world));
      expect_exact(problem, found, all_rows(problem));
      EXPECT_EQ(found.out, gathered.out);
      EXPECT_EQ(found.lse, gathered.lse);
    }
  }
}

TEST(ScatterStates, GivesTheRowsOfShardedQueries) {
  const Communicator world = test_world();
  const std::uint64_t seed = shared_seed(world);
  for (const Shape& shape : in_time(shapes())) {
    const Problem problem(shape, seed);
    SCOPED_TRACE(trace(problem, seed));
    const std::int64_t most = (problem.tokens + world.size() - 1) / world.size();
    for_layouts(problem, world, most, [&](const Shard& queries) {
      const Shard keys = keys_of(world, shape.kv_lens[0]);
      const Result gathered =
          run(world, problem, keys, options_of("gather-states", problem, world), queries);
      const Result found =
          run(world, problem, keys, options_of("scatter-states", problem, world), queries);
      expect_exact(problem, found, own_rows(problem, queries));
      EXPECT_EQ(found.out, gathered.out);
      EXPECT_EQ(found.lse, gathered.lse);
    });
  }
}

class Parts : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(All, Parts, ::testing::Values("gather-states", "scatter-states"));

TEST_P(Parts, ByRows) {
  const Communicator world = test_world();
  const std::uint64_t seed = shared_seed(world);
  for (const Shape& shape : in_time(shapes())) {
    const Problem problem(shape, seed);
    SCOPED_TRACE(trace(problem, seed));
    const Shard keys = keys_of(world, shape.kv_lens[0]);
    const Result whole = run(world, problem, keys, options_of("gather-states", problem, world));
    for_layouts(problem, world, problem.tokens, [&](const Shard& rows) {
      const Result found =
          run(world, problem, keys, options_of(GetParam(), problem, world), std::nullopt, rows);
      expect_exact(problem, found, own_rows(problem, rows));
      const Result part = part_of(problem, whole, own_rows(problem, rows), all_heads(problem));
      EXPECT_EQ(found.out, part.out);
      EXPECT_EQ(found.lse, part.lse);
    });
  }
}

TEST_P(Parts, ByHeads) {
  const Communicator world = test_world();
  const std::uint64_t seed = shared_seed(world);
  for (const Shape& shape : std::vector<Shape>{
           {.heads = 8, .q_lens = {3}, .mask = {.causal = true}, .sinks = true},
           {.heads = 9, .kv_heads = 3, .dim = 24, .q_lens = {1, 0, 5}, .kv_lens = {300, 0, 140}},
           {.heads = 7, .kv_heads = 1, .dim = 80, .dtype = DType::bf16, .sinks = true},
           {.heads = 16, .dim = 8, .value_dim = 16, .q_lens = {0}}}) {
    const Problem problem(shape, seed);
    SCOPED_TRACE(trace(problem, seed));
    const Shard keys = keys_of(world, shape.kv_lens[0]);
    const Result whole = run(world, problem, keys, options_of("gather-states", problem, world));
    expect_exact(problem, whole, all_rows(problem));
    Options options = options_of(GetParam(), problem, world);
    options.results.part = ResultPart::heads;
    const Result found = run(world, problem, keys, options);
    const Result part = part_of(problem, whole, all_rows(problem),
                                result_heads(shape.heads, world.rank(), world.size()));
    EXPECT_EQ(found.out, part.out);
    EXPECT_EQ(found.lse, part.lse);
  }
}

TEST(ResultHeads, AreDealtOutWithoutGapsAndAsEvenAsTheyCanBe) {
  for (int ranks = 1; ranks <= 9; ++ranks)
    for (int heads = ranks; heads <= 40; ++heads) {
      int next = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const HeadRange own = result_heads(heads, rank, ranks);
        EXPECT_EQ(own.begin, next);
        EXPECT_GE(own.size(), heads / ranks);
        EXPECT_LE(own.size(), (heads + ranks - 1) / ranks);
        next = own.end;
      }
      EXPECT_EQ(next, heads);
    }
}

/// Transfers match the cost: states of a part, and for a whole result the finished rows.
TEST(ScatterStates, ReceivesWhatItsCostSays) {
  const Communicator world = test_world();
  const int ranks = world.size();
  const std::int64_t rows = 4 * std::int64_t{ranks} + 1;
  const Problem problem({.heads = 8, .q_lens = {static_cast<std::int32_t>(rows)}},
                        shared_seed(world));
  const Shard striped = Shard::striped(rows, world.rank(), ranks);
  RunSize size{.tokens = 1.0 * rows, .most_tokens = 1.0 * striped.max_local_len(rows), .keys = 300};
  const auto expect_bytes = [&](const char* strategy, const Options& options,
                                std::optional<Shard> queries, std::optional<Shard> results) {
    const comm::Transport& comm = comm::transport_of(world);
    const std::uint64_t before = comm.received_bytes();
    run(world, problem, keys_of(world, 300), options, queries, results);
    Options asked = options;
    if (queries) asked.queries = Sharding{queries->layout};
    if (results) asked.results = {ResultPart::rows, {results->layout}};
    EXPECT_EQ(static_cast<double>(comm.received_bytes() - before),
              cost_of(asked, ranks, size).received_bytes)
        << strategy;
  };
  for (const char* strategy : {"gather-states", "scatter-states"}) {
    Options options = options_of(strategy, problem, world);
    options.exchange = Exchange::gather;  // transports do not count peer buffers
    expect_bytes(strategy, options, std::nullopt, std::nullopt);
    expect_bytes(strategy, options, striped, std::nullopt);
    expect_bytes(strategy, options, std::nullopt, striped);
    options.results.part = ResultPart::heads;
    expect_bytes(strategy, options, std::nullopt, std::nullopt);
  }
}

/// The reason why the layer of these options is refused.
std::string refusal(const Communicator& world, const Options& options) {
  try {
    const Attention layer(world, options);
  } catch (const Error& error) {
    return error.what();
  }
  return "not refused";
}

TEST(ScatterStates, SaysWhatItIsAndRefusesByName) {
  const Communicator world = test_world();
  Options options{.heads = 2,
                  .dtypes = {.compute = DType::fp32},
                  .limits = {.max_kv_len = 10},
                  .strategy = "scatter-states"};
  const Attention layer(world, options);
  EXPECT_STREQ(layer.strategy().name, "scatter-states");
  EXPECT_EQ(layer.exchange().by, Exchange::gather);
  Options bad = options;
  if (world.size() > 1) {
    bad.exchange = Exchange::peer_buffers;
    EXPECT_THAT(refusal(world, bad), ::testing::HasSubstr("it has no exchange peer-buffers"));
    bad = options;
  }
  if (world.size() > 2) {
    bad.results.part = ResultPart::heads;
    EXPECT_THAT(refusal(world, bad), ::testing::HasSubstr("2 heads cannot be dealt out"));
  }
  bad = options;
  bad.queries = Sharding{Layout::striped};
  bad.results.part = ResultPart::rows;
  EXPECT_THAT(refusal(world, bad), ::testing::HasSubstr("results by rows with sharded queries"));
  bad = options;
  bad.results.part = static_cast<ResultPart>(9);
  EXPECT_THAT(refusal(world, bad), ::testing::HasSubstr("a part of number 9"));
  bad = options;
  bad.strategy = "gather-kv";
  bad.results.part = ResultPart::rows;
  EXPECT_THAT(refusal(world, bad), ::testing::HasSubstr("does not give results by rows"));
  EXPECT_THAT(refusal(world, bad), ::testing::HasSubstr("could: gather-states"));
}

TEST(ScatterStates, ComparesWhatRanksMean) {
  if (test_world().size() == 1) GTEST_SKIP() << "one rank cannot disagree";
  const bool last = test_world().rank() == test_world().size() - 1;
  const auto refused = [&](ResultPart part, std::int32_t keys, bool sinks, const char* text) {
    const Communicator world = test_world();  // a run with different arguments ends its own
    const Problem problem({.heads = 8, .q_lens = {3}, .kv_lens = {keys}, .sinks = sinks},
                          shared_seed(world));
    Options options = options_of("scatter-states", problem, world);
    options.results.part = part;
    try {
      run(world, problem, keys_of(world, keys), options);
      FAIL() << "ranks disagreed and nobody said so";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr(text));
    }
  };
  refused(last ? ResultPart::heads : ResultPart::all, 100, false,
          "'results' differs between ranks");
  for (const ResultPart part : {ResultPart::all, ResultPart::heads}) {
    refused(part, 100, last, "'sinks' differs between ranks");
    refused(part, last ? 99 : 100, false, "'total_keys' differs between ranks");
  }
}

/// Rows and tables of results by rows that do not fit, each refused on the rank that has them.
TEST(ResultsByRows, AreCheckedByName) {
  const Communicator alone = self(Device::host);
  const std::vector<float> zeros(64, 0.0f);
  std::vector<float> out(64), lse(8);
  const auto tensor = [&](const std::vector<float>& memory, std::int64_t rows) {
    return Tensor(const_cast<float*>(memory.data()), DType::fp32, {rows, 1, 8}, Device::host);
  };
  Options options{.head_dim = 8,
                  .dtypes = {.compute = DType::fp32},
                  .limits = {.max_tokens = 4},
                  .results = {ResultPart::rows, {Layout::listed}}};
  std::vector<std::int64_t> table{3, 0, 1, -1};
  const auto outcome = [&](std::int64_t rows) -> std::string {
    Attention layer(alone, options);
    AttentionArgs args{.q = tensor(zeros, 4),
                       .k = tensor(zeros, 2),
                       .v = tensor(zeros, 2),
                       .out = tensor(out, rows),
                       .total_keys = 2};
    if (options.results.rows.layout == Layout::listed)
      args.query_table = {table.data(), {4}, Device::host};
    try {
      layer.run(args);
    } catch (const InputError& error) {
      return error.what();
    }
    return "ran";
  };
  EXPECT_EQ(outcome(3), "ran");
  EXPECT_THAT(outcome(2), ::testing::HasSubstr("query_table[2] is 1"));
  EXPECT_THAT(outcome(5), ::testing::HasSubstr("out has 5 rows"));
  table[1] = 4;
  EXPECT_THAT(outcome(3), ::testing::HasSubstr("query_table[1] is 4"));
  options.results.rows = {Layout::striped};
  EXPECT_THAT(outcome(3), ::testing::HasSubstr("gives rank 0 4 of 4 rows of q; out has 3"));
  EXPECT_EQ(outcome(4), "ran");
}

}  // namespace
}  // namespace longspan::tests
