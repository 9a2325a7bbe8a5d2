// gather-kv on every rank count: against float64, the bits of one process alone, and what it
// refuses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "longspan/longspan.hpp"
#include "tests/dist/differing_run.hpp"
#include "tests/dist/layer_run.hpp"
#include "tests/dist/refused_layer.hpp"
#include "tests/dist/run_again.hpp"
#include "tests/dist/world.hpp"
#include "tests/support/message.hpp"

namespace longspan::tests {
namespace {

Options gathered_options(const Problem& problem, const Communicator& world) {
  Options options = options_for(problem, world);
  options.strategy = "gather-kv";
  options.limits.max_kv_len = problem.shape.kv_lens[0] + 1;
  return options;
}

TEST(GatherKv, AgreesWithFloat64InEveryLayoutAndHasTheBitsOfOneProcess) {
  const Communicator world = test_world(), alone = self(world.device());
  const std::uint64_t seed = shared_seed(world);
  for (const Shape& shape : shapes()) {
    if (shape.kv_lens.size() > 1) continue;
    const Problem problem(shape, seed);
    const std::int64_t length = shape.kv_lens[0];
    const Result single = run(alone, problem, {.length = length}, gathered_options(problem, alone));
    for (Layout layout : {Layout::contiguous, Layout::zigzag, Layout::striped, Layout::interleaved})
      for (std::int64_t block : {16, 128}) {
        SCOPED_TRACE(std::string(name(layout)) + " kv " + std::to_string(length) + " dim " +
                     std::to_string(shape.dim) + " seed " + std::to_string(seed));
        const Shard shard{layout, world.rank(), world.size(), length, block};
        const Result found = run(world, problem, shard, gathered_options(problem, world));
        expect_exact(problem, found, all_rows(problem));
        // Alone nothing travels, and an interleaved shard has its own order.
        if (world.size() > 1) {
          EXPECT_EQ(found.out, single.out);
          EXPECT_EQ(found.lse, single.lse);
        }
        if (layout != Layout::interleaved) break;
      }
  }
}

/// Ends of the ranks' ranges: the first rank has more than its share.
std::vector<std::int64_t> uneven_ranges(std::int64_t length, int ranks) {
  std::vector<std::int64_t> table{0};
  for (int r = 1; r <= ranks; ++r)
    table.push_back(r == ranks ? length : std::min(length, length / 2 + r));
  return table;
}

/// Every rank attends only with its own rows of the queries: masks and biases depend on a row's
/// position in the sequence, not on its number on the rank.
TEST(GatherKv, AttendsWithItsOwnRowsWhereTheyStand) {
  const Communicator world = test_world(), alone = self(world.device());
  const std::uint64_t seed = shared_seed(world);
  for (const Shape& shape : shapes()) {
    if (shape.kv_lens.size() > 1) continue;
    const Problem problem(shape, seed);
    const std::int64_t length = shape.kv_lens[0], rows = shape.q_lens[0];
    const Result single = run(alone, problem, {.length = length}, gathered_options(problem, alone));
    const std::vector<std::int64_t> ranges = uneven_ranges(rows, world.size());
    for (Layout layout :
         {Layout::contiguous, Layout::zigzag, Layout::striped, Layout::interleaved, Layout::ranges})
      for (std::int64_t block : {3, 16}) {
        if (layout == Layout::ranges && world.device() != Device::host) break;  // the table is here
        SCOPED_TRACE(std::string(name(layout)) + " rows " + std::to_string(rows) + " kv " +
                     std::to_string(length) + " dim " + std::to_string(shape.dim) + " seed " +
                     std::to_string(seed));
        const Shard keys = Shard::zigzag(length, world.rank(), world.size());
        const Shard queries{layout,       world.rank(),
                            world.size(), rows,
                            block,        layout == Layout::ranges ? ranges.data() : nullptr};
        const Result found = run(world, problem, keys, gathered_options(problem, world), queries);
        expect_exact(problem, found, own_rows(problem, queries));
        if (world.device() == Device::host) {  // a GPU takes few rows by another kernel
          EXPECT_EQ(found.out, problem.share_results(single.out, queries));
        }
        if (layout != Layout::interleaved) break;
      }
  }
}

/// Alone a rank has all rows of every sequence, also with options for shared rows.
TEST(GatherKv, AloneItTakesBatchesOfSharedRows) {
  const Communicator alone = self(test_world().device());
  const Problem problem({.q_lens = {1, 0, 17, 40}, .kv_lens = {333, 50, 0, 40}},
                        shared_seed(test_world()));
  Options options = options_for(problem, alone);
  options.strategy = "gather-kv";
  const Result found = run(alone, problem, Shard::contiguous(0, 0, 1), options,
                           Shard::contiguous(problem.tokens, 0, 1));
  expect_exact(problem, found, all_rows(problem));
}

/// Whether the ranks' GPUs write each other's memory.
bool reach_each_other(const Communicator& world) {
  const Options probe{.head_dim = 64, .strategy = "gather-states"};
  return Attention(world, probe).exchange().has_peer_buffers();
}

/// Long queries, which GPUs begin with before all keys have come, and others, which they do not.
/// Keys of the last ones travel in more than one piece on two ranks.
std::vector<Shape> shapes_of_puts() {
  return {{.heads = 4,
           .kv_heads = 2,
           .dim = 128,
           .dtype = DType::bf16,
           .q_lens = {kSimulated ? 200 : 700},
           .kv_lens = {kSimulated ? 620 : 1500},
           .mask = {.causal = true}},
          {.heads = 2,
           .kv_heads = 2,
           .dim = 96,
           .value_dim = 64,
           .dtype = DType::fp16,
           .q_lens = {333},
           .kv_lens = {333},
           .mask = {.causal = true, .window = 100},
           .sinks = true},
          {.heads = 2, .dim = 128, .dtype = DType::bf16, .q_lens = {9}, .kv_lens = {600}},
          {.heads = 2, .dim = 64, .q_lens = {60}, .kv_lens = {300}, .mask = {.causal = true}},
          {.heads = 2, .dim = 64, .dtype = DType::bf16, .q_lens = {60}, .kv_lens = {0}},
          {.heads = 8,
           .kv_heads = 8,
           .dim = 128,
           .dtype = DType::bf16,
           .q_lens = {80},
           .kv_lens = {8300},
           .mask = {.causal = true}}};
}

/// GPUs that reach each other put keys where they are attended to, and begin before all have come;
/// elsewhere NCCL sends them: the same bits.
TEST(GatherKv, GivesTheSameBitsEveryWay) {
  const Communicator world = test_world();
  if (world.device() == Device::host) GTEST_SKIP() << "keys have one way between CPUs";
  if (world.size() == 1) GTEST_SKIP() << "alone nothing has to travel";
  const bool reach = reach_each_other(world);
  const std::uint64_t seed = shared_seed(world);
  for (const Shape& shape : shapes_of_puts()) {
    const Problem problem(shape, seed);
    const std::int64_t length = shape.kv_lens[0];
    const int rank = world.rank(), ranks = world.size();
    // With three stretches for each rank, and with so many that NCCL sends them.
    const std::int64_t block = length / (3 * ranks) + 1;
    for (const Shard& keys :
         {Shard::zigzag(length, rank, ranks), Shard::contiguous(length, rank, ranks),
          Shard::interleaved(length, rank, ranks, block), Shard::striped(length, rank, ranks)}) {
      for (const bool sharded : {true, false}) {
        const bool once = length > 8000;  // for the time it takes
        if (once && !(sharded && keys.layout == Layout::zigzag)) continue;
        SCOPED_TRACE(std::string(name(keys.layout)) + " kv " + std::to_string(length) + " dim " +
                     std::to_string(shape.dim) + " seed " + std::to_string(seed));
        std::optional<Shard> rows;
        if (sharded) rows = Shard::zigzag(shape.q_lens[0], world.rank(), world.size());
        Options options = gathered_options(problem, world);
        options.invariant = false;
        const ExchangeInfo exchange = Attention(world, options).exchange();
        EXPECT_EQ(exchange.has_peer_buffers(), reach);
        EXPECT_EQ(exchange.peer_bytes > 0, reach);
        const Result by_puts = run(world, problem, keys, options, rows);
        options.exchange = Exchange::gather;
        EXPECT_EQ(Attention(world, options).exchange().by, Exchange::gather);
        const Result by_nccl = run(world, problem, keys, options, rows);
        EXPECT_EQ(by_puts.out, by_nccl.out);
        EXPECT_EQ(by_puts.lse, by_nccl.lse);
        expect_exact(problem, by_puts, sharded ? own_rows(problem, *rows) : all_rows(problem));
      }
    }
  }
}

/// Keys and values side by side in one array are copied before they are sent. That copy has its own
/// memory until the attention has ended, since it reads own keys there.
TEST(GatherKv, TakesKeysAndValuesOfOneArray) {
  const Communicator world = test_world();
  const Device device = world.device();
  constexpr int kHeads = 2, kDim = 128, kRows = 150, kKeys = 700;
  const Problem problem({.heads = kHeads,
                         .kv_heads = kHeads,
                         .dim = kDim,
                         .dtype = DType::bf16,
                         .q_lens = {kRows},
                         .kv_lens = {kKeys},
                         .mask = {.causal = true}},
                        shared_seed(world));
  const Shard own = Shard::zigzag(kKeys, world.rank(), world.size()),
              rows = Shard::zigzag(kRows, world.rank(), world.size());
  constexpr std::size_t kRowBytes = std::size_t{kHeads} * kDim * 2;
  const std::vector<std::byte> k = problem.share_keys(own), v = problem.share_values(own);
  std::vector<std::byte> both;
  for (std::size_t at = 0; at < k.size(); at += kRowBytes)
    for (const auto* from : {&k, &v})
      both.insert(both.end(), from->data() + at, from->data() + at + kRowBytes);
  const Buffer q = to_device(world, problem.share_rows(rows)), kv = to_device(world, both),
               out = to_device(world, std::vector<std::byte>(q.bytes(), std::byte{0xff}));
  const auto tensor = [&](const Buffer& memory, const Shard& shard, std::int64_t length) {
    return Tensor(memory.data(), DType::bf16, {shard.local_len(length), kHeads, kDim}, device);
  };
  Tensor keys = tensor(kv, own, kKeys);
  keys.stride[0] *= 2;
  Tensor values = keys;
  values.data = static_cast<std::byte*>(kv.data()) + kRowBytes;
  Options options = gathered_options(problem, world);
  options.invariant = false;
  options.keys = {Layout::zigzag};
  options.queries = Sharding{Layout::zigzag};
  options.limits.max_tokens = rows.max_local_len(kRows);
  Attention layer(world, options);
  layer.run({.q = tensor(q, rows, kRows),
             .k = keys,
             .v = values,
             .out = tensor(out, rows, kRows),
             .total_keys = kKeys,
             .total_tokens = kRows});
  layer.wait();
  const auto bytes = static_cast<std::size_t>(rows.local_len(kRows)) * kRowBytes;
  const std::vector<std::byte> found = to_host(out, bytes);
  EXPECT_LE(problem.max_error(found, own_rows(problem, rows)), problem.tolerance());
  EXPECT_EQ(found, run(world, problem, own, options, rows).out);  // of keys that need no copy
}

/// One layer repeatedly, also as a graph, with other keys: nothing of an earlier run is left in
/// memory that the peers write, nor its signals.
TEST(GatherKv, RunsAgainWithOtherKeys) {
  const Communicator world = test_world();
  const std::uint64_t seed = shared_seed(world);
  const Shape shape{.heads = 2,
                    .kv_heads = 2,
                    .dim = 128,
                    .dtype = DType::bf16,
                    .q_lens = {600},
                    .kv_lens = {600},
                    .mask = {.causal = true}};
  Options options = gathered_options(Problem(shape, seed), world);
  options.invariant = false;
  options.keys = {Layout::zigzag};
  options.queries = Sharding{Layout::zigzag};
  options.limits = {.max_tokens = Shard::zigzag(600, 0, world.size()).max_local_len(600),
                    .max_kv_len = 600};
  expect_right_again_and_again(world, shape, options, seed,
                               {true, true, false, false, true, true, false, false});
}

TEST(GatherKv, SaysWhatItIs) {
  const Communicator world = test_world();
  const Attention layer(
      world,
      {.dtypes = {.compute = DType::fp32}, .limits = {.max_kv_len = 10}, .strategy = "gather-kv"});
  EXPECT_STREQ(layer.strategy().name, "gather-kv");
  if (world.device() == Device::host || world.size() == 1)
    EXPECT_EQ(layer.exchange().by, Exchange::gather);
  else
    EXPECT_EQ(layer.exchange().has_peer_buffers(), reach_each_other(world));
  const Attention plain(world, {.dtypes = {.compute = DType::fp32}, .limits = {.max_kv_len = 10}});
  EXPECT_STREQ(plain.strategy().name, "gather-states");
}

TEST(GatherKv, RefusesByNameWhatAnotherStrategyCould) {
  const Communicator world = test_world();
  if (world.size() == 1) GTEST_SKIP() << "alone no key has to travel";
  const Options good{
      .dtypes = {.compute = DType::fp32}, .limits = {.max_kv_len = 10}, .strategy = "gather-kv"};
  const auto refused = [&](const Options& options, const char* word) {
    expect_refused_layer(world, options, word);
  };
  Options bad = good;
  bad.limits.max_kv_len = 0;
  refused(bad, "max_kv_len");
  bad.limits.max_kv_len = bad.limits.max_batch = std::numeric_limits<int>::max();
  refused(bad, "max_total_keys");
  bad = good;
  bad.exchange = Exchange::peer_buffers_apart;
  refused(bad, "peer-buffers-apart");
  bad.exchange = Exchange::peer_buffers;
  if (reach_each_other(world))
    EXPECT_EQ(Attention(world, bad).exchange().by, Exchange::peer_buffers);
  else
    EXPECT_THROW(Attention(world, bad), Unsupported);
}

TEST(GatherKv, RefusesRunsByNameOnEveryRankAndGoesOn) {
  const Communicator world = test_world();
  if (world.size() == 1) GTEST_SKIP() << "alone no key has to travel";
  const Device device = world.device();
  Options options{.head_dim = 16,
                  .dtypes = {.compute = DType::fp32},
                  .limits = {.max_tokens = 4, .max_kv_len = 5000},
                  .queries = Sharding{Layout::listed},
                  .strategy = "gather-kv"};
  Attention listed_rows(world, options);
  options.queries.reset();
  Attention layer(world, options);
  options.keys = {Layout::listed};
  Attention listed_keys(world, options);
  const std::vector<float> zeros(5000 * 16, 0.0f);
  std::vector<std::int64_t> rows(4, -1);
  rows[0] = world.rank();
  const Buffer q = to_device(world, zeros), k = to_device(world, zeros),
               v = to_device(world, zeros), out = to_device(world, zeros),
               places = to_device(world, rows);
  const auto tensor = [&](const Buffer& memory, std::int64_t count) {
    return Tensor(memory.data(), DType::fp32, {count, 1, 16}, device);
  };
  const AttentionArgs good{.q = tensor(q, 4),
                           .k = tensor(k, 5000),
                           .v = tensor(v, 5000),
                           .out = tensor(out, 4),
                           .total_keys = 10};
  const auto refused = [&](Attention& by, auto change, const char* word) {
    AttentionArgs args = good;
    change(args);
    try {
      by.run(args);
      FAIL() << "ran, in spite of " << word;
    } catch (const Unsupported& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr(word));
      EXPECT_THAT(error.what(), ::testing::HasSubstr("gather-states"));
    }
  };
  const auto* const positions = static_cast<const std::int64_t*>(places.data());
  refused(
      listed_rows,
      [&](AttentionArgs& a) {
        a.q = tensor(q, 1);
        a.out = tensor(out, 1);
        a.total_tokens = world.size();
        a.query_table = {positions, {4}, device};
      },
      "listed query rows");
  if (device != Device::host)
    refused(
        listed_keys,
        [&](AttentionArgs& a) {
          a.key_table = {positions, {1}, device};
          a.total_keys = world.size();
        },
        "listed keys");
  layer.run(good);
  layer.wait();
}

TEST(GatherKv, ComparesWhatRanksMean) {
  const bool last = test_world().rank() == test_world().size() - 1;
  const auto refused = [&](Layout layout, std::int32_t keys, bool sinks, const char* text) {
    const Communicator world = test_world();  // a run with different arguments ends its own
    const Problem problem({.q_lens = {3}, .kv_lens = {keys}, .sinks = sinks}, shared_seed(world));
    Options options = gathered_options(problem, world);
    options.limits.max_kv_len = 200;
    try {
      run(world, problem, {layout, world.rank(), world.size(), keys}, options);
      FAIL() << "ranks disagreed and nobody said so";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr(text));
    }
  };
  if (test_world().size() == 1) GTEST_SKIP() << "one rank cannot disagree";
  // When the layer is made; in a run whose exchanges are the same; and where they have other
  // lengths.
  refused(last ? Layout::striped : Layout::contiguous, 100, false, "'keys' differs between ranks");
  refused(Layout::contiguous, 100, last, "'sinks' differs between ranks");
  refused(Layout::contiguous, last ? 99 : 100, false, "'total_keys' differs between ranks");
}

TEST(GatherKv, ComparesWhatRanksMeanWhereTheKernelBeginsEarly) {
  expect_what_differs_is_named("gather-kv");
}

}  // namespace
}  // namespace longspan::tests
