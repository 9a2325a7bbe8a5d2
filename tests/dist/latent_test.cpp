// Latent keys (MLA), whose first columns are the values (Options::values_in_keys): by every
// strategy the bits of values of their own, and float64; the bytes of the table, which count a key
// once; new tokens of several at a time; refusals on every rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "longspan/buffer.hpp"
#include "longspan/longspan.hpp"
#include "src/strategy/strategy.hpp"
#include "tests/dist/latent_error.hpp"
#include "tests/dist/world.hpp"
#include "tests/support/message.hpp"

namespace longspan::tests {
namespace {

struct LatentShape {
  int heads = 16, dim = 40, value_dim = 24;
  std::int64_t keys = 700, rows = 5;
  Sharding rule{Layout::contiguous, kSegment};
};

/// One sequence, and this rank's part of it.
class Latent : public testing::Test {
 protected:
  Latent() : world(test_world()) {}

  void make(const LatentShape& given) {
    s = given;
    random_.seed(shared_seed(world));
    q = fill(s.rows * s.heads * s.dim);
    k = fill(s.keys * s.dim);
    const Shard shard = s.rule.resolve(s.keys, world.rank(), world.size());
    own_.clear();
    for (std::int64_t i = 0; i < shard.local_len(s.keys); ++i) {
      const std::int64_t at = shard.position(i, s.keys) * s.dim;
      own_.insert(own_.end(), k.begin() + at, k.begin() + at + s.dim);
    }
  }

  Options options(const std::string& strategy, bool in_keys) const {
    Options o{.heads = s.heads,
              .kv_heads = 1,
              .head_dim = s.dim,
              .value_dim = s.value_dim,
              .values_in_keys = in_keys,
              .dtypes = {.compute = fp32},
              .mask = {.causal = true},
              .keys = s.rule,
              .strategy = strategy,
              .threads = 1};
    o.limits.max_tokens = s.rows;
    o.limits.max_kv_len = s.keys;
    return o;
  }

  /// The bits of out and lse of a fresh layer, which must write all of them.
  std::vector<float> run(const Options& o) {
    Attention layer(world, o);
    return run(layer);
  }
  std::vector<float> run(Attention& layer) {
    const bool in_keys = layer.options().values_in_keys;
    const std::int64_t count = s.rows * s.heads, own = std::ssize(own_) / s.dim;
    std::vector<float> result(static_cast<std::size_t>(count * (s.value_dim + 1)), NAN), values;
    for (std::int64_t i = 0; i < own; ++i)
      values.insert(values.end(), own_.begin() + i * s.dim, own_.begin() + i * s.dim + s.value_dim);
    const Buffer rows = on_device(q), keys = on_device(own_), apart = on_device(values);
    const Buffer to = on_device(result);
    AttentionArgs args{
        .q = Tensor(rows.data(), fp32, {s.rows, s.heads, s.dim}, world.device()),
        .k = Tensor(keys.data(), fp32, {own, 1, s.dim}, world.device()),
        .out = Tensor(to.data(), fp32, {s.rows, s.heads, s.value_dim}, world.device()),
        .lse = Lse::tokens_heads(Tensor(static_cast<float*>(to.data()) + count * s.value_dim, fp32,
                                        {s.rows, s.heads}, world.device())),
        .total_keys = s.keys};
    if (layer.options().queries) args.total_tokens = s.rows * world.size();
    if (!in_keys) args.v = Tensor(apart.data(), fp32, {own, 1, s.value_dim}, world.device());
    const std::uint64_t before = world.received_bytes();
    layer.run(args);
    layer.wait();
    received = world.received_bytes() - before;
    to.download(result.data());
    return result;
  }

  /// The largest difference of out and lse from float64.
  double off(const std::vector<float>& found) const {
    return latent_error(q, k, found, {s.rows, s.heads, s.keys, s.dim, s.value_dim});
  }

  Buffer on_device(const std::vector<float>& values) const {
    Buffer memory(world.device(), std::max<std::size_t>(1, values.size()) * sizeof(float));
    if (!values.empty()) memory.upload(values.data());
    return memory;
  }
  std::vector<float> fill(std::int64_t count) {
    std::vector<float> values(static_cast<std::size_t>(count));
    for (float& value : values) value = normal_(random_);
    return values;
  }

  Communicator world;
  LatentShape s;
  std::vector<float> q, k;
  std::uint64_t received = 0;

 private:
  std::vector<float> own_;
  std::mt19937_64 random_;
  std::normal_distribution<float> normal_;
};

TEST_F(Latent, EveryStrategyGivesTheBitsOfValuesOfTheirOwn) {
  for (const LatentShape& shape :
       {LatentShape{},
        {.heads = 128, .dim = 576, .value_dim = 512, .keys = 300, .rows = 1},
        {.heads = 16, .rule = {Layout::interleaved, 16}},
        {.heads = 17, .rule = {Layout::striped}}})
    for (const StrategyInfo& info : strategies()) {
      SCOPED_TRACE(std::string(info.name) + " " + name(shape.rule.layout));
      make(shape);
      std::vector<float> once;
      try {
        once = run(options(info.name, true));
      } catch (const Unsupported&) {
        EXPECT_THROW(run(options(info.name, false)), Unsupported);
        continue;
      }
      EXPECT_LT(off(once), 1e-5);
      EXPECT_EQ(run(options(info.name, false)), once);
    }
}

/// The causal offset of several new tokens where keys are dealt out one by one, or in blocks: the
/// keys before token t that a rank has are not those before the last one less its distance.
TEST_F(Latent, SeveralNewTokensSeeTheirOwnKeysInEveryLayout) {
  for (const std::int64_t block : {1, 3, 16, 64})
    for (const std::int64_t rows : {2, 4, 8})
      for (const std::int64_t keys : {8, 65, 130}) {
        make({.keys = keys, .rows = rows, .rule = {Layout::interleaved, block}});
        EXPECT_LT(off(run(options("gather-states", true))), 1e-5)
            << "block " << block << " rows " << rows << " keys " << keys;
      }
}

/// A key travels once, with its value in it.
TEST_F(Latent, BytesAreThoseOfTheTable) {
  if (world.device() != Device::host)
    GTEST_SKIP() << "bytes are counted as they come on CPUs alone";
  const int ranks = world.size();
  for (const bool by_rows : {false, true})
    for (const StrategyInfo& info : strategies()) {
      if (info.levels == 2) continue;
      SCOPED_TRACE(std::string(info.name) + (by_rows ? " by rows" : ""));
      make({.heads = 8 * ranks, .keys = std::int64_t{128} * ranks, .rows = 4});
      Options o = options(info.name, true), apart = options(info.name, false);
      if (by_rows) {  // each rank has its own, and sees all keys
        o.mask = apart.mask = {};
        o.queries = apart.queries = Sharding{Layout::striped};
      }
      try {
        run(o);
      } catch (const Unsupported&) {
        continue;
      }
      const RunSize size{static_cast<double>(by_rows ? s.rows * ranks : s.rows),
                         static_cast<double>(s.rows), static_cast<double>(s.keys)};
      double all = 0;
      for (const std::string& bytes : world.gather(std::to_string(received), "bytes"))
        all += std::stod(bytes);
      EXPECT_EQ(all / ranks, cost_of(o, ranks, size).received_bytes);
      const double keys_once = cost_of(o, ranks, size).received_bytes,
                   twice = cost_of(apart, ranks, size).received_bytes;
      const std::string strategy = info.name;
      if (ranks > 1 && (strategy == "ring-kv" || strategy == "gather-kv" || strategy == "heads"))
        EXPECT_LT(keys_once, twice);
      else
        EXPECT_EQ(keys_once, twice);
    }
}

/// Memory is that of the largest run, and stays where it is: prefill rows after decode rows, and
/// decode rows again. More rows are refused on every rank.
TEST_F(Latent, RunsOfAnySizeWithinTheLimitsShareOneWorkspace) {
  for (const char* strategy : {"gather-states", "scatter-states"}) {
    make({.rows = 40});
    Attention layer(world, options(strategy, true));
    const std::size_t bytes = layer.workspace_bytes();
    for (const std::int64_t rows : {1, 40, 1, 7}) {
      make({.rows = rows});
      EXPECT_LT(off(run(layer)), 1e-5) << rows;
      EXPECT_EQ(layer.workspace_bytes(), bytes);
    }
    make({.rows = 41});
    EXPECT_THROW(run(layer), InputError);
  }
}

TEST_F(Latent, RanksThatDifferAndOtherValuesAreRefused) {
  if (world.size() > 1) {
    try {
      make({});
      run(options("auto", world.rank() == 0));
      FAIL() << "ranks differ";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr("values_in_keys"));
    }
  }
  const Communicator alone = self();
  LatentShape shape;
  Options o{.heads = 2,
            .kv_heads = 1,
            .head_dim = 8,
            .value_dim = 4,
            .values_in_keys = true,
            .dtypes = {.compute = fp32}};
  Attention layer(alone, o);
  std::vector<float> rows(16), keys(80), out(8), others(80);
  AttentionArgs args{.q = Tensor(rows.data(), {1, 2, 8}),
                     .k = Tensor(keys.data(), {10, 1, 8}),
                     .out = Tensor(out.data(), {1, 2, 4}),
                     .total_keys = 10};
  EXPECT_NO_THROW(layer.run(args));
  const auto refuse = [&](const Tensor& v, const char* why) {
    AttentionArgs bad = args;
    bad.v = v;
    try {
      layer.run(bad);
      FAIL() << why;
    } catch (const InputError& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr(why));
    }
  };
  refuse(Tensor(others.data(), {10, 1, 4}, {8, 8, 1}), "values that are the first 4 columns of k");
  refuse(Tensor(keys.data() + 1, {10, 1, 4}, {8, 8, 1}), "leave v out, or give that view of k");
  refuse(Tensor(keys.data(), {10, 1, 3}, {8, 8, 1}), "v is [10, 1, 3]");
  refuse(Tensor(keys.data(), {10, 1, 4}), "strides of its own");
  args.k = Tensor(keys.data(), {10, 1, 7});
  refuse({}, "rows of 8 (head_dim) are wanted");
  EXPECT_THROW(Attention(alone, {.head_dim = 8, .value_dim = 9, .values_in_keys = true}),
               UsageError);
  Options back{.head_dim = 8, .values_in_keys = true, .gradients = true};
  back.limits.max_kv_len = 9;
  EXPECT_THROW(Attention(alone, back), Unsupported);
}

}  // namespace
}  // namespace longspan::tests
