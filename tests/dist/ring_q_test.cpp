// ring-q on every rank count: against float64, the bits of gather-states, rows that need not
// travel, and what it refuses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "comm/transport.hpp"
#include "longspan/longspan.hpp"
#include "tests/dist/layer_run.hpp"
#include "tests/dist/refused_layer.hpp"
#include "tests/dist/world.hpp"
#include "tests/support/message.hpp"

namespace longspan::tests {
namespace {

Options options_of(const char* strategy, const Problem& problem, const Communicator& world) {
  Options options = options_for(problem, world);
  options.strategy = strategy;
  return options;
}

/// Ends of the ranks' ranges: the first rank has more than its share, and the last has none.
std::vector<std::int64_t> uneven_ranges(std::int64_t length, int ranks) {
  std::vector<std::int64_t> table{0};
  for (int r = 1; r <= ranks; ++r)
    table.push_back(r >= ranks - 1 ? length : std::min(length, length / 2 + r));
  return table;
}

constexpr Layout kRules[] = {Layout::contiguous, Layout::zigzag, Layout::striped,
                             Layout::interleaved};

TEST(RingQ, AgreesWithFloat64InEveryLayoutAndHasTheBitsOfGatherStates) {
  const Communicator world = test_world();
  const std::uint64_t seed = shared_seed(world);
  for (const Shape& shape : in_time(shapes())) {
    const Problem problem(shape, seed);
    for (const Layout layout : kRules)
      for (const Layout keys_layout : {Layout::contiguous, Layout::interleaved}) {
        SCOPED_TRACE(std::string(name(layout)) + " rows " + std::to_string(problem.tokens) +
                     " of keys " + name(keys_layout) + " dim " + std::to_string(shape.dim) +
                     " seed " + std::to_string(seed));
        const Shard keys{keys_layout, world.rank(), world.size(), shape.kv_lens[0], 16};
        const Shard queries{layout, world.rank(), world.size(), problem.tokens, 3};
        const Result found =
            run(world, problem, keys, options_of("ring-q", problem, world), queries);
        expect_exact(problem, found, own_rows(problem, queries));
        if (world.device() != Device::host) continue;  // a GPU takes few rows by another kernel
        const Result gathered =
            run(world, problem, keys, options_of("gather-states", problem, world), queries);
        EXPECT_EQ(found.out, gathered.out);
        EXPECT_EQ(found.lse, gathered.lse);
      }
  }
}

TEST(RingQ, TakesRangesWhereTheTableIsHere) {
  const Communicator world = test_world();
  if (world.device() != Device::host) GTEST_SKIP() << "the table lies on the GPU";
  const std::uint64_t seed = shared_seed(world);
  for (const Shape& shape : in_time(shapes())) {
    if (shape.kv_lens.size() > 1) continue;
    const Problem problem(shape, seed);
    const std::vector<std::int64_t> rows = uneven_ranges(problem.tokens, world.size());
    const std::vector<std::int64_t> keys = uneven_ranges(shape.kv_lens[0], world.size());
    const Shard queries = Shard::ranges(problem.tokens, world.rank(), world.size(), rows.data());
    expect_exact(problem,
                 run(world, problem,
                     Shard::ranges(shape.kv_lens[0], world.rank(), world.size(), keys.data()),
                     options_of("ring-q", problem, world), queries),
                 own_rows(problem, queries));
  }
}

/// The bytes that this rank received in a run of such a layer.
std::uint64_t received(const Communicator& world, const Problem& problem, const Shard& keys,
                       const Shard& queries) {
  const comm::Transport& comm = comm::transport_of(world);
  const std::uint64_t before = comm.received_bytes();
  expect_exact(problem, run(world, problem, keys, options_of("ring-q", problem, world), queries),
               own_rows(problem, queries));
  return comm.received_bytes() - before;
}

/// In a contiguous layout under a causal mask, rows of rank r see the keys of ranks up to r: the
/// states of that many others come back, and rows come from as many ranks as there are above.
TEST(RingQ, SendsNoRowsToKeysThatTheyDoNotSee) {
  const Communicator world = test_world();
  const int rank = world.rank(), ranks = world.size();
  if (ranks == 1) GTEST_SKIP() << "alone nothing travels";
  const std::int32_t length = 128 * ranks;
  const Problem causal({.q_lens = {length}, .kv_lens = {length}, .mask = {.causal = true}},
                       shared_seed(world));
  const Problem full({.q_lens = {length}, .kv_lens = {length}}, shared_seed(world));
  const Shard even = Shard::contiguous(length, rank, ranks);
  const std::uint64_t rows = 128 * 4 * 64 * 4, states = 128 * 4 * 4 * (64 + 2);
  EXPECT_EQ(received(world, causal, even, even), (ranks - 1 - rank) * rows + rank * states);
  EXPECT_EQ(received(world, full, even, even), (ranks - 1) * (rows + states));
  Options options = options_of("ring-q", full, world);
  options.queries = Sharding{};
  const RunSize size{.tokens = 1.0 * length, .most_tokens = 128, .keys = 1.0 * length};
  EXPECT_EQ(cost_of(options, ranks, size).received_bytes, 1.0 * (ranks - 1) * (rows + states));
}

/// Every row sees only its own key, which its rank has. The tiles of rows include keys of the other
/// ranks, which are not there.
TEST(RingQ, SendsNothingWhereEveryRankSeesItsOwnKeysAlone) {
  const Communicator world = test_world();
  const std::int32_t length = (kSimulated ? 64 : 320) * world.size() + 5;
  const Problem problem({.dtype = DType::bf16,
                         .q_lens = {length},
                         .kv_lens = {length},
                         .mask = {.causal = true, .window = 1}},
                        shared_seed(world));
  const Shard blocks = Shard::interleaved(length, world.rank(), world.size(), 64);
  EXPECT_EQ(received(world, problem, blocks, blocks), 0u);
}

TEST(RingQ, AloneItTakesAnyBatch) {
  const Communicator alone = self(test_world().device());
  const Problem problem({.q_lens = {1, 0, 17, 40}, .kv_lens = {333, 50, 0, 40}},
                        shared_seed(test_world()));
  const Result found =
      run(alone, problem, Shard::contiguous(0, 0, 1), options_of("ring-q", problem, alone),
          Shard::contiguous(problem.tokens, 0, 1));
  expect_exact(problem, found, all_rows(problem));
}

TEST(RingQ, RefusesByNameWhatAnotherStrategyCould) {
  const Communicator world = test_world();
  if (world.size() == 1) GTEST_SKIP() << "alone no row has to travel";
  const Options good{.dtypes = {.compute = DType::fp32},
                     .queries = Sharding{Layout::zigzag},
                     .strategy = "ring-q"};
  EXPECT_STREQ(Attention(world, good).strategy().name, "ring-q");
  const auto refused = [&](const Options& options, const char* word) {
    expect_refused_layer(world, options, word);
  };
  Options bad = good;
  bad.queries.reset();
  refused(bad, "rows of sharded queries");
  const Problem problem({.q_lens = {world.size()}, .kv_lens = {40}}, shared_seed(world));
  const std::vector<std::int64_t> own{world.rank()};
  const Shard listed = Shard::at_positions(world.size(), world.rank(), world.size(), own.data(), 1);
  if (world.device() != Device::host) return;
  try {
    run(world, problem, Shard::contiguous(40, world.rank(), world.size()),
        options_of("ring-q", problem, world), listed);
    FAIL() << "took listed rows";
  } catch (const Unsupported& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("listed query rows; gather-states does"));
  }
}

TEST(RingQ, ComparesWhatRanksMean) {
  if (test_world().size() == 1) GTEST_SKIP() << "one rank cannot disagree";
  const bool last = test_world().rank() == test_world().size() - 1;
  const auto refused = [&](std::int32_t keys, bool sinks, const char* text) {
    const Communicator world = test_world();  // a run with different arguments ends its own
    const Problem problem({.q_lens = {30}, .kv_lens = {keys}, .sinks = sinks}, shared_seed(world));
    try {
      run(world, problem, Shard::zigzag(keys, world.rank(), world.size()),
          options_of("ring-q", problem, world), Shard::striped(30, world.rank(), world.size()));
      FAIL() << "ranks disagreed and nobody said so";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr(text));
    }
  };
  refused(100, last, "'sinks' differs between ranks");
  refused(last ? 99 : 100, false, "'total_keys' differs between ranks");
}

}  // namespace
}  // namespace longspan::tests
