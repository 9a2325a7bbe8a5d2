// gather-kv on every rank count: against float64, the bits of one process alone, and what it
// refuses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "longspan/longspan.hpp"
#include "tests/dist/layer_run.hpp"
#include "tests/dist/refused_layer.hpp"
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
        // Alone nothing travels, and an interleaved shard has an order of its own.
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

/// Every rank attends with its own rows of the queries alone: masks and biases go by where a row
/// stands in the sequence, and not by its number on the rank.
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

/// Alone a rank has all rows of every sequence, also where its options say that rows are shared.
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

TEST(GatherKv, SaysWhatItIs) {
  const Communicator world = test_world();
  const Attention layer(
      world,
      {.dtypes = {.compute = DType::fp32}, .limits = {.max_kv_len = 10}, .strategy = "gather-kv"});
  EXPECT_STREQ(layer.strategy().name, "gather-kv");
  EXPECT_EQ(layer.exchange().by, Exchange::gather);
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
  bad = good;
  bad.exchange = Exchange::peer_buffers;
  refused(bad, "peer-buffers");
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
    const Communicator world = test_world();  // a run that ranks mean differently ends its own
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
  // When the layer is made; in a run whose exchanges are alike; and where they have other lengths.
  refused(last ? Layout::striped : Layout::contiguous, 100, false, "'keys' differs between ranks");
  refused(Layout::contiguous, 100, last, "'sinks' differs between ranks");
  refused(Layout::contiguous, last ? 99 : 100, false, "'total_keys' differs between ranks");
}

}  // namespace
}  // namespace longspan::tests
