// ring-kv on every rank count and device: against float64, repeatedly as a graph with other
// lengths, the timing, and what it refuses. tests/dist/strategies_test.cpp has all else.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "longspan/longspan.hpp"
#include "tests/dist/layer_run.hpp"
#include "tests/dist/refused_layer.hpp"
#include "tests/dist/replay.hpp"
#include "tests/dist/world.hpp"
#include "tests/support/message.hpp"

namespace longspan::tests {
namespace {

Options ring_options(const Problem& problem, const Communicator& world) {
  Options options = options_for(problem, world);
  options.strategy = "ring-kv";
  options.invariant = false;
  options.limits.max_kv_len =
      1 + *std::max_element(problem.shape.kv_lens.begin(), problem.shape.kv_lens.end());
  return options;
}

TEST(RingKv, AgreesWithFloat64) {
  const Communicator world = test_world();
  const std::uint64_t seed = shared_seed(world);
  for (const Shape& shape : shapes()) {
    const Problem problem(shape, seed);
    for (Layout layout : {Layout::contiguous, Layout::zigzag, Layout::striped, Layout::interleaved})
      for (std::int64_t block : {16, 128}) {
        SCOPED_TRACE(std::string(name(layout)) + " kv " + std::to_string(shape.kv_lens[0]) +
                     " dim " + std::to_string(shape.dim) + " seed " + std::to_string(seed));
        const Shard keys{layout, world.rank(), world.size(), shape.kv_lens[0], block};
        const Shard queries{layout, world.rank(), world.size(), shape.q_lens[0], block};
        const Result found = run(world, problem, keys, ring_options(problem, world), queries);
        expect_exact(problem, found, own_rows(problem, queries));
        if (layout != Layout::interleaved) break;
      }
  }
}

/// A bound of the keys of a problem with which the blocks of all steps do not fit into memory at
/// once, so that two hold them in turn. It matters on four ranks and more.
std::int64_t keys_for_two_blocks(const Problem& problem, int ranks) {
  const std::int64_t key_and_value =
      2 * std::int64_t{problem.shape.kv_heads} * problem.shape.dim * sizeof(float);
  return (std::int64_t{66} << 20) / key_and_value * ranks / (ranks - 1);
}

/// Where GPUs reach each other copy engines send the keys, elsewhere NCCL: the same bits, whether
/// or not every step has its own block.
TEST(RingKv, GivesTheSameBitsEveryWay) {
  const Communicator world = test_world();
  if (world.device() == Device::host) GTEST_SKIP() << "keys have one way between CPUs";
  Options probe{.head_dim = 64, .strategy = "gather-states"};
  const bool reach = Attention(world, probe).exchange().has_peer_buffers();
  const std::uint64_t seed = shared_seed(world);
  std::size_t with_own_blocks = 0, with_two_blocks = 0;
  for (const Shape& shape : shapes()) {
    const Problem problem(shape, seed);
    const Shard keys{Layout::zigzag, world.rank(), world.size(), shape.kv_lens[0]};
    const Shard queries{Layout::zigzag, world.rank(), world.size(), shape.q_lens[0]};
    for (const bool two_blocks : {false, true}) {
      if (two_blocks && (world.size() < 4 || with_two_blocks > 0)) continue;
      Options options = ring_options(problem, world);
      options.keys = {Layout::zigzag};
      options.queries = Sharding{Layout::zigzag};
      if (two_blocks) options.limits.max_kv_len = keys_for_two_blocks(problem, world.size());
      const ExchangeInfo exchange = Attention(world, options).exchange();
      EXPECT_EQ(exchange.has_peer_buffers(), reach);
      (two_blocks ? with_two_blocks : with_own_blocks) = exchange.peer_bytes;
      const Result by_copies = run(world, problem, keys, options, queries);
      options.exchange = Exchange::gather;
      const ExchangeInfo gathering = Attention(world, options).exchange();
      EXPECT_EQ(gathering.by, Exchange::gather);
      EXPECT_EQ(gathering.peer_bytes, 0U);
      const Result by_nccl = run(world, problem, keys, options, queries);
      EXPECT_EQ(by_copies.out, by_nccl.out)
          << "kv " << shape.kv_lens[0] << (two_blocks ? ", two blocks" : "") << " seed " << seed;
    }
  }
  if (!reach) return;
  EXPECT_GT(with_own_blocks, 0U);
  if (world.size() < 4) return;
  EXPECT_GT(with_two_blocks, with_own_blocks);
  EXPECT_LT(with_two_blocks, std::size_t{64} << 20);  // those of all steps would be more
}

/// A layer for dense keys has no block to copy them to, gives the same bits, and refuses others.
TEST(RingKv, DenseKeysAreSentFromWhereTheyLie) {
  const Communicator world = test_world();
  const Device device = world.device();
  const Problem problem(shapes().front(), shared_seed(world));
  const Shard keys{Layout::zigzag, world.rank(), world.size(), problem.shape.kv_lens[0]};
  const Shard queries{Layout::zigzag, world.rank(), world.size(), problem.shape.q_lens[0]};
  Options options = ring_options(problem, world);
  options.keys = {Layout::zigzag};
  options.queries = Sharding{Layout::zigzag};
  const Result found = run(world, problem, keys, options, queries);
  const Attention any(world, options);
  options.limits.dense_keys = true;
  EXPECT_EQ(run(world, problem, keys, options, queries).out, found.out);
  Attention dense(world, options);
  if (world.size() > 1 && any.exchange().has_peer_buffers())
    EXPECT_LT(dense.workspace_bytes(), any.workspace_bytes());
  else
    EXPECT_EQ(dense.workspace_bytes(), any.workspace_bytes());
  if (world.size() == 1) return;  // no key travels

  const std::int64_t rows = queries.local_len(problem.shape.q_lens[0]),
                     held = keys.local_len(problem.shape.kv_lens[0]),
                     row = std::int64_t{problem.shape.dim} * size_of(options.dtypes.compute);
  Buffer q(device, rows * options.heads * row), k(device, 2 * held * options.kv_heads * row),
      out(device, rows * options.heads * row);
  const auto tensor = [&](const Buffer& memory, std::int64_t count, int heads) {
    return Tensor(memory.data(), options.dtypes.compute, {count, heads, problem.shape.dim}, device);
  };
  AttentionArgs args{.q = tensor(q, rows, options.heads),
                     .k = tensor(k, held, options.kv_heads),
                     .v = tensor(k, held, options.kv_heads),
                     .out = tensor(out, rows, options.heads),
                     .total_keys = problem.shape.kv_lens[0],
                     .total_tokens = problem.shape.q_lens[0]};
  args.k.stride[0] *= 2;
  EXPECT_THAT([&] { dense.run(args); }, testing::ThrowsMessage<InputError>(testing::HasSubstr(
                                            "the layer was made for runs of which they can "
                                            "(dense_keys)")));
}

/// A layer for a batch whose lengths change between runs, as in a graph. On a GPU only the device
/// knows them, and transfers have the size of the layer's limits.
TEST(RingKv, RunsAgainWithOtherLengths) {
  const Communicator world = test_world();
  const Device device = world.device();
  const std::uint64_t seed = shared_seed(world);
  constexpr int kBatch = 3, kHeads = 2, kDim = 64, kMost = 300, kRows = 40;
  const int ranks = world.size();
  const Shard rule{Layout::zigzag, world.rank(), ranks};
  const std::size_t row = kHeads * kDim * sizeof(float);
  Buffer q(device, kBatch * kRows * row), k(device, kBatch * kMost * row),
      v(device, kBatch * kMost * row), out(device, kBatch * kRows * row), starts(device, 16),
      lens(device, 16);
  Options options{
      .heads = kHeads,
      .kv_heads = kHeads,
      .head_dim = kDim,
      .dtypes = {.compute = DType::fp32},
      .mask = {.causal = true},
      .limits = {.max_tokens = kBatch * kRows, .max_batch = kBatch, .max_kv_len = kMost},
      .keys = {Layout::zigzag},
      .queries = Sharding{Layout::zigzag},
      .strategy = "ring-kv"};
  Attention layer(world, options);
  // A rank has equally many rows in every run, as in a graph; lengths of keys differ.
  const Shape shape{.heads = kHeads,
                    .kv_heads = kHeads,
                    .dim = kDim,
                    .q_lens = {2 * ranks, 0, 4 * ranks},
                    .kv_lens = {kMost, 1, 5 * ranks},
                    .mask = {.causal = true}};
  const std::int64_t rows = 6;
  const auto tensor = [&](const Buffer& memory, std::int64_t n) {
    return Tensor(memory.data(), DType::fp32, {n, kHeads, kDim}, device);
  };
  const AttentionArgs args{
      .q = tensor(q, rows),
      .k = tensor(k, kBatch * kMost),
      .v = tensor(v, kBatch * kMost),
      .out = tensor(out, rows),
      .total_tokens = 6 * ranks,
      .query_start = {static_cast<const std::int32_t*>(starts.data()), {kBatch + 1}, device},
      .kv_len = {static_cast<const std::int32_t*>(lens.data()), {kBatch}, device}};
  Replay replay(device, [&](Stream stream) { layer.run(args, stream); });
  for (int turn = 0; turn < 4; ++turn) {
    Shape now = shape;
    now.kv_lens[0] = turn == 1 ? 2 * ranks : kMost - 50 * turn;
    now.kv_lens[2] = 4 * ranks + 17 * turn;
    const Problem problem(now, seed + static_cast<std::uint64_t>(turn));
    const auto give = [&](Buffer& to, std::vector<std::byte> values) {
      values.resize(to.bytes(), std::byte{0xff});
      to.upload(values.data());
    };
    const auto ints = [](const std::vector<std::int32_t>& values) {
      std::vector<std::byte> bytes(values.size() * 4);
      std::memcpy(bytes.data(), values.data(), bytes.size());
      return bytes;
    };
    give(q, problem.share_rows(rule));
    give(k, problem.share_keys(rule));
    give(v, problem.share_values(rule));
    give(out, {});
    give(starts, ints(problem.query_start));
    give(lens, ints(now.kv_lens));
    if (turn == 0)
      replay.eager();  // the first use of a library makes things that cannot be made in a capture
    else
      replay.again();
    layer.wait(replay.stream());
    const std::vector<std::int64_t> own = own_rows(problem, rule);
    ASSERT_EQ(std::ssize(own), rows);
    EXPECT_LE(problem.max_error(to_host(out, rows * row), own), problem.tolerance())
        << "turn " << turn << " seed " << seed;
  }
}

/// Two phases a step, each with its time: none is lost with any number of ranks.
TEST(RingKv, TimesEveryStep) {
  const Communicator world = test_world();
  const Problem problem({.q_lens = {16 * world.size()}, .kv_lens = {300}}, shared_seed(world));
  const Device device = world.device();
  Options options = ring_options(problem, world);
  options.queries = Sharding{Layout::striped};
  options.limits.max_tokens = 16;
  options.debug.profile = true;
  Attention layer(world, options);
  const Shard keys = Shard::contiguous(300, world.rank(), world.size()),
              rows = Shard::striped(problem.tokens, world.rank(), world.size());
  const Buffer q = to_device(world, problem.share_rows(rows)),
               k = to_device(world, problem.share_keys(keys)),
               v = to_device(world, problem.share_values(keys)), out(device, 16 * 4 * 64 * 4);
  const std::int64_t count = keys.local_len(300);
  for (int i = 0; i < 2; ++i) {
    layer.run({.q = Tensor(q.data(), DType::fp32, {16, 4, 64}, device),
               .k = Tensor(k.data(), DType::fp32, {count, 2, 64}, device),
               .v = Tensor(v.data(), DType::fp32, {count, 2, 64}, device),
               .out = Tensor(out.data(), DType::fp32, {16, 4, 64}, device),
               .total_keys = 300,
               .total_tokens = problem.tokens});
    layer.wait();
    EXPECT_GT(layer.phases().attend, 0);
    if (world.size() > 1) {
      EXPECT_GT(layer.phases().exchange, 0);
    }
  }
}

/// The last step ends with the result, by the kernel for long queries too, but not where another
/// rank has other arguments for the run.
TEST(RingKv, RanksThatDifferAreToldAndWriteNothing) {
  for (const DType dtype : {DType::fp32, DType::bf16}) {
    const Communicator world = test_world();
    if (world.size() == 1) GTEST_SKIP() << "one rank agrees with itself";
    const Device device = world.device();
    constexpr std::int64_t kRows = 192, kHeads = 2, kDim = 128, kElements = kRows * kHeads * kDim;
    const std::int64_t all = kRows * world.size();
    Attention layer(world, {.heads = kHeads,
                            .kv_heads = kHeads,
                            .head_dim = kDim,
                            .dtypes = {.compute = dtype},
                            .mask = {.causal = true},
                            .limits = {.max_tokens = kRows, .max_kv_len = all},
                            .keys = {Layout::zigzag},
                            .queries = Sharding{Layout::zigzag},
                            .strategy = "ring-kv"});
    const std::size_t bytes = static_cast<std::size_t>(kElements) * size_of(dtype);
    const std::vector<std::byte> ones(bytes, std::byte{0x3c}), poison(bytes, std::byte{0xff});
    Buffer rows(device, bytes), out(device, bytes), sinks(device, kHeads * sizeof(float));
    rows.upload(ones.data());
    out.upload(poison.data());
    sinks.upload(std::vector<float>(kHeads, 1.0f).data());
    const auto tensor = [&](const Buffer& memory) {
      return Tensor(memory.data(), dtype, {kRows, kHeads, kDim}, device);
    };
    AttentionArgs args{.q = tensor(rows),
                       .k = tensor(rows),
                       .v = tensor(rows),
                       .out = tensor(out),
                       .total_keys = all,
                       .total_tokens = all};
    if (world.rank() == world.size() - 1)
      args.sinks = Tensor(sinks.data(), DType::fp32, {kHeads}, device);
    try {
      layer.run(args);
      layer.wait();
      ADD_FAILURE() << "ran with sinks on one rank";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr("'sinks' differs between ranks"));
    }
    EXPECT_EQ(to_host(out, bytes), poison);
  }
}

TEST(RingKv, RefusesByNameWhatAnotherStrategyCould) {
  const Communicator world = test_world();
  if (world.size() == 1) GTEST_SKIP() << "alone no key has to travel";
  const Options good{.dtypes = {.compute = DType::fp32},
                     .limits = {.max_kv_len = 10},
                     .queries = Sharding{},
                     .strategy = "ring-kv"};
  const auto refused = [&](const Options& options, const char* word) {
    expect_refused_layer(world, options, word);
  };
  Options bad = good;
  bad.limits.max_kv_len = 0;
  refused(bad, "max_kv_len");
  bad.limits.max_kv_len = bad.limits.max_batch = std::numeric_limits<int>::max();
  refused(bad, "max_total_keys");
  bad = good;
  bad.queries.reset();
  refused(bad, "Options::queries");
  bad = good;
  bad.exchange = Exchange::peer_buffers_apart;
  refused(bad, "peer-buffers-apart");
  EXPECT_STREQ(Attention(world, good).strategy().name, "ring-kv");
}

/// On CPUs a rank is told that it has fewer rows than its share of a batch; no row after those is
/// read.
TEST(RingKv, RefusesFewerRowsThanTheShareOfABatch) {
  const Communicator world = test_world();
  if (world.device() != Device::host) GTEST_SKIP() << "on a GPU only the device knows";
  Attention layer(world, {.head_dim = 16,
                          .dtypes = {.compute = DType::fp32},
                          .limits = {.max_tokens = 10, .max_batch = 2, .max_kv_len = 10},
                          .keys = {Layout::striped},
                          .queries = Sharding{Layout::striped},
                          .strategy = "ring-kv"});
  const int ranks = world.size();
  std::vector<float> rows(10 * 16, 1.0f), out(rows.size());
  const std::vector<std::int32_t> start{0, 3 * ranks, 5 * ranks}, lens{3, 3};
  const auto run = [&](std::int64_t count) {
    layer.run({.q = Tensor(rows.data(), DType::fp32, {count, 1, 16}),
               .k = Tensor(rows.data(), DType::fp32, {6, 1, 16}),
               .v = Tensor(rows.data(), DType::fp32, {6, 1, 16}),
               .out = Tensor(out.data(), DType::fp32, {count, 1, 16}),
               .total_tokens = 5 * ranks,
               .query_start = {start.data(), {3}},
               .kv_len = {lens.data(), {2}}});
  };
  try {
    run(4);
    FAIL() << "ran with a row less";
  } catch (const InputError& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("5 rows of the sequences"));
    EXPECT_THAT(error.what(), ::testing::HasSubstr("q has 4"));
  }
  run(5);
}

TEST(RingKv, ComparesWhatRanksMean) {
  if (test_world().size() == 1) GTEST_SKIP() << "one rank cannot disagree";
  const bool last = test_world().rank() == test_world().size() - 1;
  const auto refused = [&](std::int32_t keys, bool sinks, const char* text) {
    const Communicator world = test_world();  // a run with different arguments ends its own
    const Problem problem({.q_lens = {7}, .kv_lens = {keys}, .sinks = sinks}, shared_seed(world));
    Options options = ring_options(problem, world);
    options.limits.max_kv_len = 200;
    const Shard rows = Shard::striped(7, world.rank(), world.size());
    try {
      run(world, problem, Shard::striped(keys, world.rank(), world.size()), options, rows);
      FAIL() << "ranks disagreed and nobody said so";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr(text));
    }
  };
  refused(100, last, "'sinks' differs between ranks");
  refused(last ? 90 : 100, false, "'total_keys' differs between ranks");
}

}  // namespace
}  // namespace longspan::tests
