// The layer on every rank count: against float64, and bit for bit against one process alone.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "longspan/longspan.hpp"
#include "tests/dist/layer_run.hpp"
#include "tests/dist/world.hpp"
#include "tests/support/message.hpp"
#include "tests/support/problem.hpp"
#include "tests/support/simulated.hpp"

namespace longspan::tests {
namespace {

TEST(Layer, AgreesWithFloat64InEveryLayout) {
  const Communicator world = test_world();
  const std::uint64_t seed = shared_seed(world);
  for (const Shape& shape : shapes()) {
    const Problem problem(shape, seed);
    const std::int64_t length = shape.kv_lens[0];
    for (Layout layout : {Layout::contiguous, Layout::zigzag, Layout::striped, Layout::interleaved})
      for (std::int64_t block : {16, 128}) {
        SCOPED_TRACE(std::string(name(layout)) + " kv " + std::to_string(length) + " dim " +
                     std::to_string(shape.dim) + " seed " + std::to_string(seed));
        const Shard shard{layout, world.rank(), world.size(), length, block};
        expect_exact(problem, run(world, problem, shard, options_for(problem, world)),
                     all_rows(problem));
        if (layout != Layout::interleaved) break;
      }
  }
}

TEST(Layer, ShardedQueriesGetTheirOwnRows) {
  const Communicator world = test_world();
  const std::uint64_t seed = shared_seed(world);
  for (const Shape& shape : shapes()) {
    const Problem problem(shape, seed);
    for (Layout layout :
         {Layout::contiguous, Layout::zigzag, Layout::striped, Layout::interleaved}) {
      SCOPED_TRACE(std::string(name(layout)) + " kv " + std::to_string(shape.kv_lens[0]) +
                   " seed " + std::to_string(seed));
      const Shard shard{layout, world.rank(), world.size(), shape.kv_lens[0], 16};
      Shard rows = shard;
      rows.length = problem.tokens;
      expect_exact(problem, run(world, problem, shard, options_for(problem, world), rows),
                   own_rows(problem, rows));
    }
  }
}

TEST(Layer, TakesUnevenRangesAndListedPositions) {
  const Communicator world = test_world();
  const std::uint64_t seed = shared_seed(world);
  const Problem problem({.q_lens = {40}, .kv_lens = {500}, .mask = {.causal = true, .window = 90}},
                        seed);
  std::mt19937_64 random(seed);
  std::vector<std::int64_t> cuts(world.size() + 1, 0), order(500);
  for (int r = 1; r < world.size(); ++r) cuts[r] = static_cast<std::int64_t>(random() % 501);
  cuts.back() = 500;
  std::sort(cuts.begin(), cuts.end());
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  const std::int64_t first = cuts[world.rank()], count = cuts[world.rank() + 1] - first;

  // The table is on the kernels' device; the host's copy cuts the data.
  const auto check = [&](Shard on_host, const std::vector<std::int64_t>& table) {
    const Buffer copy = to_device(world, table);
    on_host.table = table.data();
    Problem own = problem;
    const std::vector<std::byte> k = own.share_keys(on_host), v = own.share_values(on_host);
    const Shape& s = own.shape;
    const Buffer dq = to_device(world, own.q), dk = to_device(world, k), dv = to_device(world, v),
                 out = to_device(world, std::vector<std::byte>(own.q.size(), std::byte{0xff}));
    const Device device = world.device();
    const std::int64_t keys = on_host.local_len(500);
    attend(world,
           {.q = Tensor(dq.data(), s.dtype, {40, s.heads, s.dim}, device),
            .k = Tensor(dk.data(), s.dtype, {keys, s.kv_heads, s.dim}, device),
            .v = Tensor(dv.data(), s.dtype, {keys, s.kv_heads, s.dim}, device),
            .out = Tensor(out.data(), s.dtype, {40, s.heads, s.dim}, device),
            .total_keys = 500,
            .key_table = Tensor(static_cast<const std::int64_t*>(copy.data()),
                                {static_cast<std::int64_t>(table.size())}, device)},
           {.mask = s.mask, .keys = {on_host.layout}});
    EXPECT_LE(own.max_error(to_host(out, own.q.size()), all_rows(own)), own.tolerance());
  };
  check(Shard::ranges(500, world.rank(), world.size(), nullptr), cuts);
  const std::vector<std::int64_t> listed(order.begin() + first, order.begin() + first + count);
  check(Shard::at_positions(500, world.rank(), world.size(), nullptr, count), listed);
}

TEST(Layer, SameBitsAsOneProcessAlone) {
  const Communicator world = test_world(), alone = self(world.device());
  const std::uint64_t seed = shared_seed(world);
  for (std::int32_t kv_len : {1, 127, 4097, 5000, 131073})
    for (DType dtype : {DType::fp32, DType::bf16})
      for (std::int32_t rows : {1, 40}) {
        if (kv_len == 131073 && (rows > 1 || dtype != DType::fp32)) continue;  // time
        if (kv_len > 4097 && kSimulated) continue;
        const Problem problem({.heads = 2,
                               .kv_heads = 1,
                               .dtype = dtype,
                               .q_lens = {rows},
                               .kv_lens = {kv_len},
                               .mask = {.causal = true}},
                              seed);
        for (Layout layout : {Layout::contiguous, Layout::interleaved}) {
          SCOPED_TRACE(std::string(name(layout)) + " kv " + std::to_string(kv_len) + " seed " +
                       std::to_string(seed));
          const Shard own{layout, world.rank(), world.size(), kv_len};
          const Shard whole{layout, 0, 1, kv_len};
          const Result shared = run(world, problem, own, options_for(problem, world));
          const Result single = run(alone, problem, whole, options_for(problem, alone));
          if (own.keeps_order()) {
            EXPECT_EQ(shared.out, single.out);
            EXPECT_EQ(shared.lse, single.lse);
          }
          for (const std::string& text : world.gather(
                   std::string(reinterpret_cast<const char*>(shared.out.data()), shared.out.size()),
                   "comparison"))
            EXPECT_EQ(0, std::memcmp(text.data(), shared.out.data(), text.size()))
                << "ranks got different bits";
        }
      }
}

TEST(Layer, SaysWhatARankHolds) {
  const Communicator world = test_world();
  for (Layout layout : {Layout::contiguous, Layout::zigzag, Layout::striped, Layout::interleaved})
    for (std::int64_t length : {0, 1, 700, 70001}) {
      SCOPED_TRACE(std::string(name(layout)) + " " + std::to_string(length));
      const Attention layer(world, {.keys = {layout, 48}});
      const Shard found = layer.shard(length);
      const Shard expected{layout, world.rank(), world.size(), length, 48};
      EXPECT_EQ(found.length, length);
      ASSERT_EQ(found.local_len(length), expected.local_len(length));
      for (std::int64_t i = 0; i < found.local_len(length); ++i)
        ASSERT_EQ(found.position(i, length), expected.position(i, length));
    }
  for (Layout layout : {Layout::ranges, Layout::listed}) {
    const Attention layer(world, {.keys = {layout}});
    EXPECT_THROW(layer.shard(700), UsageError);
  }
}

TEST(Layer, DifferentOptionsAreAnErrorOnEveryRank) {
  const Communicator world = test_world();
  if (world.size() == 1) GTEST_SKIP() << "one rank cannot disagree";
  Options options{.heads = 4, .kv_heads = 2, .head_dim = 64, .dtypes = {.compute = DType::fp32}};
  options.mask.window = world.rank() == world.size() - 1 ? 7 : 3;
  try {
    Attention layer(world, options);
    FAIL() << "ranks disagreed and nobody said so";
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("window"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("7"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("3"), std::string::npos) << error.what();
  }
}

TEST(Layer, RefusesByNameWhatItCannotDo) {
  const Communicator world = test_world();
  const Options good{.heads = 4, .kv_heads = 2, .head_dim = 64, .dtypes = {.compute = DType::fp32}};
  Options bad = good;
  bad.head_dim = 577;
  EXPECT_THROW(Attention(world, bad), Unsupported);
  bad = good;
  bad.kv_heads = 3;
  EXPECT_THROW(Attention(world, bad), UsageError);
  bad = good;
  bad.strategy = "telepathy";
  EXPECT_THROW(Attention(world, bad), Unsupported);
}

TEST(Layer, RefusesRunsThatDoNotFit) {
  const Communicator world = test_world();
  const Device device = world.device();
  Attention layer(world, {.heads = 2,
                          .kv_heads = 1,
                          .head_dim = 64,
                          .dtypes = {.compute = DType::fp32},
                          .limits = {.max_tokens = 4}});
  const Buffer memory(device, 1 << 20);
  const auto tensor = [&](std::int64_t rows, std::int64_t heads, std::int64_t dim,
                          DType dtype = DType::fp32) {
    return Tensor(memory.data(), dtype, {rows, heads, dim}, device);
  };
  const auto array = [&](DType dtype, std::int64_t extent) {
    return Tensor(memory.data(), dtype, {extent}, device);
  };
  const AttentionArgs good{.q = tensor(4, 2, 64),
                           .k = tensor(10, 1, 64),
                           .v = tensor(10, 1, 64),
                           .out = tensor(4, 2, 64),
                           .total_keys = 10};
  const auto refused = [&](auto change) {
    AttentionArgs args = good;
    change(args);
    EXPECT_THROW(layer.run(args), InputError);
  };
  refused([&](AttentionArgs& a) { a.q = a.out = tensor(5, 2, 64); });
  refused([&](AttentionArgs& a) { a.q = tensor(4, 2, 64, DType::bf16); });
  refused([&](AttentionArgs& a) { a.out = tensor(3, 2, 64); });
  refused([&](AttentionArgs& a) { a.k = tensor(10, 2, 64); });
  refused([&](AttentionArgs& a) { a.v = tensor(9, 1, 64); });
  refused([&](AttentionArgs& a) {
    a.query_start = array(DType::int32, 3);
    a.kv_len = array(DType::int32, 2);
    a.total_keys = 0;
  });
  refused([&](AttentionArgs& a) { a.q.stride[2] = 2; });
  refused([&](AttentionArgs& a) { a.key_table = array(DType::int64, world.size() + 1); });
  refused([&](AttentionArgs& a) { a.total_keys = 1000; });
  refused([&](AttentionArgs& a) { a.lse = Lse::tokens_heads(tensor(4, 2, 64)); });
}

}  // namespace
}  // namespace longspan::tests
