// What the layer refuses, by name and with nothing written: options, runs over a paged or quantised
// cache with all their small arrays, and appends. And that ranks compare every option.
#include "src/arguments/validate.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "longspan/attention.hpp"
#include "longspan/element.hpp"
#include "longspan/error.hpp"

namespace longspan {
namespace {

using ::testing::HasSubstr;

constexpr int kHeads = 4, kKvHeads = 2, kDim = 32, kPage = 16, kPages = 9, kTokens = 4;

template <class E>
void expect_refused(const std::string& text, const std::function<void()>& call) {
  SCOPED_TRACE(text);
  try {
    call();
    ADD_FAILURE() << "not refused";
  } catch (const E& error) {
    EXPECT_THAT(error.what(), HasSubstr(text));
  } catch (const Error& error) {
    ADD_FAILURE() << "another kind of error: " << error.what();
  }
}

Options options() {
  return {.heads = kHeads,
          .kv_heads = kKvHeads,
          .head_dim = kDim,
          .dtypes = {.compute = fp32},
          .mask = {.causal = true},
          .limits = {.max_tokens = kTokens, .max_batch = 2},
          .threads = 1};
}

TEST(Validate, OptionsThatMakeNoSense) {
  const auto refuse = [](const char* text, const std::function<void(Options&)>& change) {
    Options o = options();
    change(o);
    expect_refused<UsageError>(text, [&] { check_options(o); });
  };
  check_options(options());
  refuse("dtypes.compute e4m3: products are of fp64, fp32, fp16 or bf16",
         [](Options& o) { o.dtypes.compute = e4m3; });
  refuse("dtypes.compute int32: products are of",
         [](Options& o) { o.dtypes.compute = DType::int32; });
  refuse("dtypes.compute no type: products are of",
         [](Options& o) { o.dtypes.compute = static_cast<DType>(99); });
  refuse("dtypes.kv uint8: it is", [](Options& o) { o.dtypes.kv = DType::uint8; });
  refuse("dtypes.query bf16: it is dtypes.compute (fp32) or fp8",
         [](Options& o) { o.dtypes.query = bf16; });
  refuse("dtypes.kv fp16: it is dtypes.compute (fp32) or fp8",
         [](Options& o) { o.dtypes.kv = fp16; });
  refuse("dtypes.out bf16: it is dtypes.compute (fp32) or fp8",
         [](Options& o) { o.dtypes.out = bf16; });
  refuse("tf32 is a way to make fp32 products",
         [](Options& o) { o.dtypes.compute = bf16, o.dtypes.tf32 = true; });
  for (const DType dtype : {fp32, fp16})
    refuse("bf16_products is a way to make bf16 products",
           [&](Options& o) { o.dtypes.compute = dtype, o.dtypes.bf16_products = true; });
  const auto fp8 = [](Options& o) {
    o.dtypes.compute = bf16, o.dtypes.query = o.dtypes.kv = e4m3, o.head_dim = 64,
    o.dtypes.fp8_products = true;
  };
  Options taken = options();
  fp8(taken);
  check_options(taken);
  refuse("dtypes.query is bf16 and dtypes.kv is e4m3: give both as e4m3",
         [&](Options& o) { fp8(o), o.dtypes.query = {}; });
  refuse("dtypes.query is e4m3 and dtypes.kv is e5m2: give both as e4m3",
         [&](Options& o) { fp8(o), o.dtypes.kv = e5m2; });
  refuse("fp8_products with dtypes.compute fp32: take bf16",
         [&](Options& o) { fp8(o), o.dtypes.compute = fp32; });
  refuse("fp8_products with invariant", [&](Options& o) { fp8(o), o.invariant = true; });
  for (const int dim : {16, 32, 40, 56, 72, 200}) {
    Options o = taken;
    o.head_dim = dim;
    expect_refused<Unsupported>("in steps of 16 are supported", [&] { check_options(o); });
  }
  for (const int dim : {48, 64, 80, 128, 192, 256}) {
    Options o = taken;
    o.head_dim = dim;
    EXPECT_NO_THROW(check_options(o)) << dim;
  }
  Options narrow = taken;
  narrow.value_dim = 48;
  expect_refused<Unsupported>("fp8_products with head_dim 64 and value_dim 48",
                              [&] { check_options(narrow); });
  taken.score.softcap = 30;
  expect_refused<Unsupported>("fp8_products with softcap 30", [&] { check_options(taken); });
  refuse("max_kv_len -1", [](Options& o) { o.limits.max_kv_len = -1; });
  refuse("max_total_keys -1", [](Options& o) { o.limits.max_total_keys = -1; });
  refuse("max_total_keys 281474976710656",
         [](Options& o) { o.limits.max_total_keys = std::int64_t{1} << 48; });
  refuse("max_query_len -1", [](Options& o) { o.limits.max_query_len = -1; });
  refuse("ranks_per_node -1", [](Options& o) { o.ranks_per_node = -1; });
  refuse("max_workspace -1", [](Options& o) { o.limits.max_workspace = -1; });
  refuse("exchange of number 4 is not one of automatic, peer_buffers, peer_buffers_apart, gather",
         [](Options& o) { o.exchange = static_cast<Exchange>(4); });
  for (const int dim : {-8, 0, 577}) {
    Options o = options();
    o.head_dim = dim;
    expect_refused<Unsupported>("head_dim " + std::to_string(dim), [&] { check_options(o); });
  }
  for (const int dim : {-8, 0, 513}) {
    Options o = options();
    o.value_dim = dim;
    expect_refused<Unsupported>("value_dim " + std::to_string(dim), [&] { check_options(o); });
  }
  for (const auto& [head_dim, value_dim] : {std::pair{1, 512}, {203, 59}, {192, 128}, {576, 1}}) {
    Options o = options();
    o.head_dim = head_dim, o.value_dim = value_dim;
    EXPECT_NO_THROW(check_options(o)) << head_dim;
  }
  refuse("softcap -1", [](Options& o) { o.score.softcap = -1; });
  refuse("softcap is nan; it is a finite number", [](Options& o) { o.score.softcap = NAN; });
  refuse("softcap is inf", [](Options& o) { o.score.softcap = INFINITY; });
  refuse("scale is nan; it is a finite number", [](Options& o) { o.score.scale = NAN; });
  refuse("scale is -inf", [](Options& o) { o.score.scale = -INFINITY; });
  // Kernels multiply by 1 / softcap, softcap log2(e) and scale log2(e): unchecked, a silent NaN.
  for (const float softcap : {1e-45f, 1e-40f, 8e-39f, 1e38f, 3e38f})
    refuse("softcap is ", [=](Options& o) { o.score.softcap = softcap; });
  for (const float scale : {1e-45f, -1e-40f, 2.4e38f, -3e38f})
    refuse("times log2(e) it is ", [=](Options& o) { o.score.scale = scale; });
  refuse("softcap is 1e-38 with a scale of 4; scale / softcap is inf",
         [](Options& o) { o.score = {.scale = 4.0f, .softcap = 1e-38f}; });
  refuse("softcap is 8e+37 with a scale of 0.125; scale / softcap is ",
         [](Options& o) { o.head_dim = 64, o.score.softcap = 8e37f; });
  for (const ScoreOptions& score :
       {ScoreOptions{.scale = 0.0f, .softcap = 30.0f}, ScoreOptions{.scale = 0.0f},
        ScoreOptions{.scale = -2.3e38f}, ScoreOptions{.scale = 1e-30f, .softcap = 1e-38f},
        ScoreOptions{.scale = 1e4f, .softcap = 8e37f}}) {
    Options o = options();
    o.score = score;
    EXPECT_NO_THROW(check_options(o)) << score.softcap;
  }
  refuse("rope.dim 34 with head_dim 32: it is an even number of 2 to head_dim",
         [](Options& o) { o.rope.dim = 34; });
  refuse("rope.dim 7 with head_dim 32", [](Options& o) { o.rope.dim = 7; });
  refuse("rope.dim -2 with head_dim 32", [](Options& o) { o.rope.dim = -2; });
  refuse("rope.dim is 0, which is no RoPE, and", [](Options& o) { o.rope.base = 500; });
  refuse("rope.dim is 0, which is no RoPE, and", [](Options& o) { o.rope.interleaved = true; });
  for (const float number : {NAN, INFINITY, 0.0f, -1.0f, 1e-40f}) {
    refuse("rope.base is ", [=](Options& o) { o.rope = {.dim = 8, .base = number}; });
    refuse("rope.scale is ", [=](Options& o) { o.rope = {.dim = 8, .scale = number}; });
  }
  Options fp8_rows = options();
  fp8_rows.rope.dim = 32, fp8_rows.dtypes.query = e4m3;
  expect_refused<Unsupported>("RoPE with queries of e4m3 is not supported",
                              [&] { check_options(fp8_rows); });
  const auto refuse_gradients = [](const char* text, auto&& change) {
    Options o = options();
    o.gradients = true, o.limits.max_kv_len = 9;
    change(o);
    expect_refused<UsageError>(text, [&] { check_options(o); });
  };
  refuse_gradients("max_qq_gradient -1 is not in 0 to 2^20",
                   [](Options& o) { o.limits.max_qq_gradient = -1; });
  refuse_gradients("max_qq_gradient 9223372036854775807 is not in",
                   [](Options& o) { o.limits.max_qq_gradient = INT64_MAX; });
  refuse_gradients("dout of number 7 is not one of replicated, partial",
                   [](Options& o) { o.dout = static_cast<Dout>(7); });
  refuse_gradients("dout partial with sharded queries",
                   [](Options& o) { o.queries = Sharding{}, o.dout = Dout::partial; });
  Options wide = options();
  wide.dtypes.compute = DType::fp64, wide.gradients = true, wide.limits.max_kv_len = 9;
  wide.dout = Dout::partial;
  expect_refused<Unsupported>("dout partial with products of fp64", [&] { check_options(wide); });
  refuse("dout partial and max_qq_gradient are for gradients",
         [](Options& o) { o.dout = Dout::partial; });
  refuse("window -1", [](Options& o) { o.mask.window = -1; });
  refuse("window 9223372036854775807 is beyond", [](Options& o) { o.mask.window = INT64_MAX; });
  refuse("chunk -1 is not in 0", [](Options& o) { o.mask.chunk = -1; });
  refuse("chunk 9223372036854775807 is not in", [](Options& o) { o.mask.chunk = INT64_MAX; });
  refuse("lookback -1 is not in", [](Options& o) { o.mask.chunk = 4, o.mask.lookback = -1; });
  refuse("lookback 2 without a chunk", [](Options& o) { o.mask.lookback = 2; });
  refuse("prefix -3 is not in", [](Options& o) { o.mask.prefix = -3; });
  refuse("right -2", [](Options& o) { o.mask.right = -2; });
  refuse("right 9223372036854775807 is beyond", [](Options& o) { o.mask.right = INT64_MAX; });
  refuse("max_query_len 9223372036854775807",
         [](Options& o) { o.limits.max_query_len = INT64_MAX; });
  refuse("max_tokens 9223372036854775807", [](Options& o) { o.limits.max_tokens = INT64_MAX; });
  refuse("max_batch 0", [](Options& o) { o.limits.max_batch = 0; });
  refuse("heads 0", [](Options& o) { o.heads = 0; });
  refuse("kv_heads 0", [](Options& o) { o.kv_heads = 0; });
  refuse("dtypes.query no type", [](Options& o) { o.dtypes.query = static_cast<DType>(99); });
  refuse("keys have a layout of number 6, which does not exist",
         [](Options& o) { o.keys.layout = static_cast<Layout>(6); });
  refuse("keys have blocks of 0; a block has 1 to", [](Options& o) { o.keys.block = 0; });
  refuse("keys have blocks of 2147483648",
         [](Options& o) { o.keys.block = std::int64_t{1} << 31; });
  refuse("queries have a layout of number 77, which does not exist",
         [](Options& o) { o.queries = Sharding{static_cast<Layout>(77)}; });
  refuse("queries have blocks of -1", [](Options& o) {
    o.queries = Sharding{Layout::interleaved, -1};
  });
  refuse("alibi of number 7", [](Options& o) { o.score.alibi = static_cast<Alibi>(7); });
  refuse("threads -1", [](Options& o) { o.threads = -1; });
  refuse("threads 2147483647 is not in 0 to 4096", [](Options& o) { o.threads = 2147483647; });
  // No rank has that much memory, and no size of it may wrap.
  refuse("the states of such a run take", [](Options& o) {
    o.heads = o.kv_heads = std::numeric_limits<int>::max(), o.limits.max_tokens = 1 << 30;
  });
  Options large = options();
  large.limits.max_tokens = std::numeric_limits<std::int32_t>::max(), large.queries = Sharding{};
  expect_refused<UsageError>("on 1000 ranks", [&] { check_options(large, 1000); });
}

/// Rows of queries of any size travel.
TEST(Validate, ShardedQueriesOfAnySize) {
  for (int heads : {1, 3, 5})
    for (int dim : {16, 24, 40})
      for (DType dtype : {e4m3, e5m2, bf16}) {
        Options o{.heads = heads, .kv_heads = 1, .head_dim = dim, .queries = Sharding{}};
        o.dtypes.query = dtype;
        EXPECT_NO_THROW(check_options(o, 3));
      }
}

TEST(Validate, RanksCompareEveryOption) {
  const std::vector<std::pair<const char*, std::function<void(Options&)>>> changes{
      {"heads", [](Options& o) { o.heads = 8; }},
      {"kv_heads", [](Options& o) { o.kv_heads = 1; }},
      {"head_dim", [](Options& o) { o.head_dim = 64; }},
      {"value_dim", [](Options& o) { o.value_dim = 64; }},
      {"values_in_keys", [](Options& o) { o.values_in_keys = true; }},
      {"dtypes.compute", [](Options& o) { o.dtypes.compute = fp16; }},
      {"dtypes.query", [](Options& o) { o.dtypes.query = e4m3; }},
      {"dtypes.kv", [](Options& o) { o.dtypes.kv = e5m2; }},
      {"dtypes.out", [](Options& o) { o.dtypes.out = e4m3; }},
      {"tf32", [](Options& o) { o.dtypes.tf32 = true; }},
      {"fp8_products", [](Options& o) { o.dtypes.fp8_products = true; }},
      {"bf16_products", [](Options& o) { o.dtypes.bf16_products = true; }},
      {"causal", [](Options& o) { o.mask.causal = false; }},
      {"window", [](Options& o) { o.mask.window = 3; }},
      {"right", [](Options& o) { o.mask.right = 3; }},
      {"chunk", [](Options& o) { o.mask.chunk = 3; }},
      {"lookback", [](Options& o) { o.mask.lookback = 3; }},
      {"prefix", [](Options& o) { o.mask.prefix = 3; }},
      {"clamp_ranges", [](Options& o) { o.mask.clamp_ranges = true; }},
      {"alignment", [](Options& o) { o.mask.alignment = Alignment::upper_left; }},
      {"scale", [](Options& o) { o.score.scale = 0.5f; }},
      {"softcap", [](Options& o) { o.score.softcap = 30; }},
      {"alibi", [](Options& o) { o.score.alibi = Alibi::query; }},
      {"rope.dim", [](Options& o) { o.rope.dim = 8; }},
      {"rope.interleaved", [](Options& o) { o.rope.interleaved = true; }},
      {"rope.base", [](Options& o) { o.rope.base = 500; }},
      {"rope.scale", [](Options& o) { o.rope.scale = 2; }},
      {"dropout.p", [](Options& o) { o.dropout.p = 0.5; }},
      {"dropout.first_head", [](Options& o) { o.dropout.first_head = 8; }},
      {"indices.top_k", [](Options& o) { o.indices.top_k = 3; }},
      {"indices.slots", [](Options& o) { o.indices.slots = true; }},
      {"max_tokens", [](Options& o) { o.limits.max_tokens = 9; }},
      {"max_batch", [](Options& o) { o.limits.max_batch = 9; }},
      {"max_kv_len", [](Options& o) { o.limits.max_kv_len = 9; }},
      {"max_total_keys", [](Options& o) { o.limits.max_total_keys = 9; }},
      {"max_query_len", [](Options& o) { o.limits.max_query_len = 9; }},
      {"max_workspace", [](Options& o) { o.limits.max_workspace = 1 << 30; }},
      {"dense_keys", [](Options& o) { o.limits.dense_keys = true; }},
      {"ranks_per_node", [](Options& o) { o.ranks_per_node = 2; }},
      {"keys", [](Options& o) { o.keys.layout = Layout::striped; }},
      {"queries", [](Options& o) { o.queries = Sharding{}; }},
      {"results", [](Options& o) { o.results.part = ResultPart::heads; }},
      {"invariant", [](Options& o) { o.invariant = true; }},
      {"gradients", [](Options& o) { o.gradients = true; }},
      {"max_qq_gradient", [](Options& o) { o.limits.max_qq_gradient = 9; }},
      {"dout", [](Options& o) { o.dout = Dout::partial; }},
      {"strategy", [](Options& o) { o.strategy = "gather-states"; }},
      {"exchange", [](Options& o) { o.exchange = Exchange::gather; }},
      {"check_arrays", [](Options& o) { o.debug.check_arrays = true; }},
  };
  const NamedValues before = describe(options());
  std::set<std::string> seen;
  for (const auto& [name, change] : changes) {
    Options o = options();
    change(o);
    const NamedValues after = describe(o);
    bool found = false;
    for (std::size_t i = 0; i < before.size(); ++i)
      if (before[i] != after[i] && before[i].first == name) found = true;
    EXPECT_TRUE(found) << name;
    seen.insert(name);
  }
  for (const auto& [name, value] : before) EXPECT_TRUE(seen.contains(name)) << name;
}

// CPUs that make products of bf16 in other ways give other bits: that is compared, where the
// products were requested.
TEST(Validate, RanksCompareHowProductsOfBf16AreMade) {
  Options o = options();
  EXPECT_EQ(describe(o, "by AMX"), describe(o, "in fp32"));
  o.dtypes.bf16_products = true;
  EXPECT_NE(describe(o, "by AMX"), describe(o, "in fp32"));
}

/// A layer over a paged cache of one process, and a valid batch for it.
struct Paged {
  std::vector<float> q = std::vector<float>(kTokens * kHeads * kDim, 0.5f);
  std::vector<float> k = std::vector<float>(kPages * kPage * kKvHeads * kDim, 0.25f), v = k;
  std::vector<float> out = std::vector<float>(q.size(), NAN);
  std::vector<std::int32_t> table{7, 2, -1, -1, 0, 5, 3, -1};
  std::vector<std::int32_t> query_start{0, 1, 4}, kv_len{20, 33};
  std::vector<float> new_k = std::vector<float>(kTokens * kKvHeads * kDim, 1.0f), new_v = new_k;
  std::vector<float> one{1.0f}, qq = std::vector<float>(9, 0.0f);
  std::vector<std::int64_t> numbers{0, 20, 0, 33};
  std::vector<std::int32_t> padding{0, 0};

  Tensor pages(std::vector<float>& data, DType dtype = fp32) {
    return Tensor(data.data(), dtype, {kPages, kPage, kKvHeads, kDim});
  }
  AttentionArgs args() {
    return {.q = Tensor(q.data(), fp32, {kTokens, kHeads, kDim}),
            .k = pages(k),
            .v = pages(v),
            .out = Tensor(out.data(), fp32, {kTokens, kHeads, kDim}),
            .query_start = Tensor(query_start.data(), {3}),
            .kv_len = Tensor(kv_len.data(), {2}),
            .block_table = Tensor(table.data(), {2, 4})};
  }
  /// Of sequence 1 alone, whose queries are all rows.
  AttentionArgs one_sequence() {
    AttentionArgs a = args();
    a.query_start = {};
    a.kv_len = Tensor(kv_len.data() + 1, {1});
    a.block_table = Tensor(table.data() + 4, {1, 4});
    return a;
  }
  Append append() {
    return {.new_k = Tensor(new_k.data(), fp32, {kTokens, kKvHeads, kDim}),
            .new_v = Tensor(new_v.data(), fp32, {kTokens, kKvHeads, kDim}),
            .k = pages(k),
            .v = pages(v),
            .query_start = Tensor(query_start.data(), {3}),
            .kv_len = Tensor(kv_len.data(), {2}),
            .block_table = Tensor(table.data(), {2, 4})};
  }
};

template <class E = InputError>
void refuse_run(const char* text, const std::function<void(AttentionArgs&, Paged&)>& change,
                const Options& given = options()) {
  Attention layer(self(), given);
  Paged p;
  AttentionArgs r = p.args();
  change(r, p);
  const std::vector<float> before = p.k;
  expect_refused<E>(text, [&] { layer.run(r); });
  for (float value : p.out) ASSERT_TRUE(std::isnan(value)) << text;
  EXPECT_EQ(p.k, before) << text;
}

/// Data stored once have one scale. A bug once also multiplied by v_scale.
TEST(Validate, ValuesInTheMemoryOfKeysHaveTheirScale) {
  for (const int from : {0, 8}) {  // the first columns of k, and its last
    Options given = options();
    given.value_dim = kDim - 8;
    given.dtypes.kv = e4m3;
    Paged p;
    std::vector<std::uint8_t> latent(p.k.size(), 0x38);  // 1
    std::vector<float> two(kKvHeads, 2.0f), also_two = two, other{2.0f, 32.0f};
    AttentionArgs args = p.args();
    args.k = Tensor(latent.data(), e4m3, {kPages, kPage, kKvHeads, kDim});
    args.v = args.k;
    args.v.data = latent.data() + from;
    args.v.shape[3] = args.out.shape[2] = kDim - 8;
    args.k_scale = Tensor(two.data(), {kKvHeads});
    Attention layer(self(), given);
    for (const Tensor& v_scale :
         {Tensor(), args.k_scale, Tensor(also_two.data(), {kKvHeads}), Tensor(two.data(), {1})}) {
      args.v_scale = v_scale;
      layer.run(args);
      for (int c = 0; c < kDim - 8; ++c) ASSERT_FLOAT_EQ(p.out[c], 2.0f);
    }
    args.v_scale = Tensor(other.data(), {kKvHeads});
    expect_refused<InputError>(
        "k_scale is 2 and v_scale is 32 of kv head 1; v lies in the memory of k, which has one "
        "scale: give the same, or leave v_scale out",
        [&] { layer.run(args); });
    args.k_scale = {};
    expect_refused<InputError>("v_scale is given and k_scale is not", [&] { layer.run(args); });
    args.v_scale = {};
    expect_refused<InputError>("k is e4m3 and there is no k_scale", [&] { layer.run(args); });
  }
}

TEST(Validate, RunsOverAPagedCache) {
  Paged p;
  Attention layer(self(), options());
  layer.run(p.args());
  for (float value : p.out) ASSERT_FLOAT_EQ(value, 0.25f);
  Paged one;
  layer.run(one.one_sequence());
  for (float value : one.out) ASSERT_FLOAT_EQ(value, 0.25f);
}

TEST(Validate, NumbersOfDimsOfTheCallWithoutALayer) {
  struct Given {
    const char* name;
    Tensor AttentionArgs::*tensor;
  };
  for (const int dims : {-1, 0, 2, 7, 1000})
    for (const Given& given :
         {Given{"q is", &AttentionArgs::q}, Given{"k is", &AttentionArgs::k},
          Given{"v ", &AttentionArgs::v}, Given{"out is", &AttentionArgs::out}}) {
      Paged p;
      AttentionArgs args = p.args();
      (args.*given.tensor).dims = dims;
      expect_refused<InputError>(given.name, [&] { attend(self(), args, {.threads = 1}); });
    }
}

TEST(Validate, BlockTables) {
  refuse_run("block_table[1][2] is 9", [](AttentionArgs&, Paged& p) { p.table[6] = 9; });
  refuse_run("block_table[0][1] is -1", [](AttentionArgs&, Paged& p) { p.table[1] = -1; });
  refuse_run("there is room for 64 in its row of block_table",
             [](AttentionArgs&, Paged& p) { p.kv_len[1] = 65; });
  refuse_run("there is room for 32 in its row of block_table",
             [](AttentionArgs& r, Paged&) { r.block_table.shape[1] = 2; });
  refuse_run("block_table is int64; int32 is wanted",
             [](AttentionArgs& r, Paged&) { r.block_table.dtype = DType::int64; });
  refuse_run("block_table is [1, 4]; [2, columns] is wanted",
             [](AttentionArgs& r, Paged&) { r.block_table.shape[0] = 1; });
  refuse_run("block_table is [2]; [2, columns] is wanted",
             [](AttentionArgs& r, Paged&) { r.block_table.dims = 1; });
  refuse_run("block_table is on the cuda; the work is done on the host",
             [](AttentionArgs& r, Paged&) { r.block_table.device = Device::cuda; });
  refuse_run("block_table [2, 4] has stride -4 in dimension 0",
             [](AttentionArgs& r, Paged&) { r.block_table.stride[0] = -4; });
  refuse_run("pages are [pages, page, 2, 32]", [](AttentionArgs& r, Paged&) { r.k.shape[3] = 16; });
  refuse_run("k is [9, 2, 4, 16, 8]; [keys, 2, 32] is wanted, or [2, capacity, 2, 32], or pages",
             [](AttentionArgs& r, Paged& p) {
               r.k = Tensor(p.k.data(), fp32, {kPages, kKvHeads, kDim / 8, kPage, 8});
               r.block_table = {};
             });
  Options promised = options();
  promised.limits.max_kv_len = 32;
  refuse_run(
      "at most 32 were promised", [](AttentionArgs&, Paged&) {}, promised);
  Options together = options();
  together.limits.max_total_keys = 40;
  refuse_run(
      "keys together; at most 40 were promised (max_total_keys)", [](AttentionArgs&, Paged&) {},
      together);
}

TEST(Validate, LengthsOfABatch) {
  refuse_run("kv_len[1] is -3", [](AttentionArgs&, Paged& p) { p.kv_len[1] = -3; });
  refuse_run("query_start[0] is 1", [](AttentionArgs&, Paged& p) { p.query_start[0] = 1; });
  refuse_run("query_start descends at sequence 1",
             [](AttentionArgs&, Paged& p) { p.query_start[1] = 5; });
  refuse_run("query_start ends at row 6", [](AttentionArgs&, Paged& p) { p.query_start[2] = 6; });
  refuse_run("query_start is [3]; [2] is wanted", [](AttentionArgs& r, Paged&) { r.kv_len = {}; });
  refuse_run("a batch of 2 sequences needs query_start",
             [](AttentionArgs& r, Paged&) { r.query_start = {}; });
  refuse_run("kv_len is [3]: 3 sequences; the layer was made for 1 to 2 (max_batch)",
             [](AttentionArgs& r, Paged&) { r.kv_len.shape[0] = 3; });
  refuse_run("kv_len is [0]; [batch] of 1 to 2^31 - 1 sequences is wanted",
             [](AttentionArgs& r, Paged&) { r.kv_len.shape[0] = 0; });
  refuse_run("kv_len is [2, 1]; [batch] of 1 to", [](AttentionArgs& r, Paged& p) {
    r.kv_len = Tensor(p.kv_len.data(), {2, 1});
  });
}

/// The one sequence's keys are in total_keys or in kv_len, the rows of all ranks in total_tokens.
TEST(Validate, Totals) {
  refuse_run("total_keys is 20 and kv_len is given; lengths stand in one of them",
             [](AttentionArgs& r, Paged&) { r.total_keys = 20; });
  for (const auto& [keys, text] :
       {std::pair<std::int64_t, const char*>{-1, "total_keys is -1; 0 to 2^31 - 1 are supported"},
        {std::int64_t{1} << 31, "total_keys is 2147483648; 0 to 2^31 - 1 are supported"},
        {65, "there is room for 64 in its row of block_table"}})
    refuse_run(text, [keys = keys](AttentionArgs& r, Paged& p) {
      r = p.one_sequence(), r.kv_len = {}, r.total_keys = keys;
    });
  refuse_run("total_tokens is given, and the layer's queries are not sharded",
             [](AttentionArgs& r, Paged&) { r.total_tokens = kTokens; });
  refuse_run("query_table is given, and neither the layer's queries nor its results are sharded",
             [](AttentionArgs& r, Paged& p) { r.query_table = Tensor(p.numbers.data(), {2}); });
  Options sharded = options();
  sharded.queries = Sharding{};
  for (const auto& [tokens, text] :
       {std::pair<std::int64_t, const char*>{
            -1, "total_tokens is -1; the layer was made for at most 4 on each of 1 ranks"},
        {5, "total_tokens is 5; the layer was made for at most 4 on each of 1 ranks"},
        {3, "the contiguous layout of queries gives rank 0 3 of 3 rows (total_tokens); q has 4"}})
    refuse_run(
        text,
        [tokens = tokens](AttentionArgs& r, Paged& p) {
          r = p.one_sequence(), r.total_tokens = tokens;
        },
        sharded);
  refuse_run(
      "q of sharded queries must be dense",
      [](AttentionArgs& r, Paged&) { r.total_tokens = kTokens, r.q.stride[0] = kHeads * kDim + 8; },
      sharded);
}

/// One rank's layer, whose keys or queries are dealt out by a rule with a table.
Options with_keys(Layout layout) {
  Options o = options();
  o.keys.layout = layout;
  return o;
}
Options with_queries(Layout layout) {
  Options o = options();
  o.queries = Sharding{layout};
  return o;
}

TEST(Validate, TablesOfKeys) {
  const Options ranges = with_keys(Layout::ranges), listed = with_keys(Layout::listed);
  const auto refuse = [&](const char* text,
                          const std::function<void(AttentionArgs&, Paged&)>& change) {
    refuse_run(
        text,
        [&](AttentionArgs& r, Paged& p) {
          r.key_table = Tensor(p.numbers.data(), {2, 2});
          change(r, p);
        },
        ranges);
  };
  refuse("the table of ranges of sequence 1 runs from 0 to 32; the sequence has keys 0 to 33",
         [](AttentionArgs&, Paged& p) { p.numbers[3] = 32; });
  refuse("the table of ranges of sequence 0 runs from 1",
         [](AttentionArgs&, Paged& p) { p.numbers[0] = 1; });
  refuse("keys are ranges, and there is no key_table: the bounds of each rank's positions",
         [](AttentionArgs& r, Paged&) { r.key_table = {}; });
  refuse("key_table is [4]; a batch of 2 sequences needs [2, 2]",
         [](AttentionArgs& r, Paged& p) { r.key_table = Tensor(p.numbers.data(), {4}); });
  refuse("key_table is [1, 2]; a dense [2, 2] is wanted",
         [](AttentionArgs& r, Paged&) { r.key_table.shape[0] = 1; });
  refuse("key_table is [2, 3]; a dense [2, 2] is wanted",
         [](AttentionArgs& r, Paged&) { r.key_table.shape[1] = 3; });
  refuse("key_table is [2, 2]; a dense [2, 2] is wanted",
         [](AttentionArgs& r, Paged&) { r.key_table.stride[0] = 1; });
  refuse("key_table is [2, 2]; a dense [2, 2] is wanted", [](AttentionArgs& r, Paged&) {
    r.key_table.stride = {1, 2};
  });
  refuse("key_table is int32; int64 is wanted",
         [](AttentionArgs& r, Paged&) { r.key_table.dtype = DType::int32; });
  refuse("key_table is on the cuda",
         [](AttentionArgs& r, Paged&) { r.key_table.device = Device::cuda; });
  refuse("key_table is [1]; [2] is wanted", [](AttentionArgs& r, Paged& p) {
    r = p.one_sequence(), r.key_table = Tensor(p.numbers.data(), {1});
  });
  refuse("key_table is int32; int64 is wanted", [](AttentionArgs& r, Paged& p) {
    r = p.one_sequence(), r.key_table = Tensor(p.kv_len.data(), {2});
  });
  refuse_run("key_table is given, and keys are contiguous, which takes no table",
             [](AttentionArgs& r, Paged& p) {
               r.key_table = Tensor(p.numbers.data(), {2, 2});
             });
  refuse_run(
      "keys are listed, which describes one sequence; the batch has 2",
      [](AttentionArgs& r, Paged& p) { r.key_table = Tensor(p.numbers.data(), {2}); }, listed);
  for (const std::int64_t position : {-1, 33})
    refuse_run(
        "listed key 1 stands at position",
        [&](AttentionArgs& r, Paged& p) {
          r = p.one_sequence(), r.key_table = Tensor(p.numbers.data(), {2});
          p.numbers[1] = position;
        },
        listed);
  refuse_run(
      "key_table: position 1 is listed by no rank",
      [](AttentionArgs& r, Paged& p) {
        r = p.one_sequence(), r.key_table = Tensor(p.numbers.data(), {2});
      },
      listed);
  refuse_run(
      "key_table is [2, 2]; [any number] is wanted",
      [](AttentionArgs& r, Paged& p) {
        r = p.one_sequence(), r.key_table = Tensor(p.numbers.data(), {2, 2});
      },
      listed);
  refuse_run(
      "key_table has stride 2; it must be dense",
      [](AttentionArgs& r, Paged& p) {
        r = p.one_sequence(), r.key_table = Tensor(p.numbers.data(), {2});
        r.key_table.stride[0] = 2;
      },
      listed);

  Paged batch, one, all;
  AttentionArgs a = batch.args();
  a.key_table = Tensor(batch.numbers.data(), {2, 2});
  Attention(self(), ranges).run(a);
  EXPECT_FLOAT_EQ(batch.out.back(), 0.25f);
  a = one.one_sequence();
  a.key_table = Tensor(one.numbers.data() + 2, {2});
  Attention(self(), ranges).run(a);
  EXPECT_FLOAT_EQ(one.out.back(), 0.25f);
  a = all.one_sequence();
  all.numbers.resize(33);
  std::iota(all.numbers.rbegin(), all.numbers.rend(), 0);
  a.key_table = Tensor(all.numbers.data(), {33});
  Attention(self(), listed).run(a);
  EXPECT_FLOAT_EQ(all.out.back(), 0.25f);
}

TEST(Validate, TablesOfQueries) {
  const Options ranges = with_queries(Layout::ranges), listed = with_queries(Layout::listed);
  const auto rows = [](AttentionArgs& r, Paged& p, std::int64_t entries) {
    r = p.one_sequence();
    r.total_tokens = kTokens;
    p.numbers = {0, kTokens, 2, 3};
    r.query_table = Tensor(p.numbers.data(), {entries});
  };
  refuse_run(
      "queries are ranges, which describes one sequence; the batch has 2",
      [&](AttentionArgs& r, Paged& p) {
        r.total_tokens = kTokens, r.query_table = Tensor(p.numbers.data(), {2});
      },
      ranges);
  refuse_run(
      "queries are ranges, and there is no query_table",
      [&](AttentionArgs& r, Paged& p) { rows(r, p, 2), r.query_table = {}; }, ranges);
  refuse_run(
      "query_table is [3]; [2] is wanted", [&](AttentionArgs& r, Paged& p) { rows(r, p, 3); },
      ranges);
  refuse_run(
      "query_table is [1, 2]; a dense [1, 2] is wanted",
      [&](AttentionArgs& r, Paged& p) {
        rows(r, p, 2), r.query_table = Tensor(p.numbers.data(), {1, 2});
      },
      ranges);
  refuse_run(
      "the ranges layout of queries gives rank 0 3 of 3 rows (total_tokens); q has 4",
      [&](AttentionArgs& r, Paged& p) {
        rows(r, p, 2), p.numbers[1] = r.total_tokens = kTokens - 1;
      },
      ranges);
  for (const std::int64_t end : {std::int64_t{3}, std::int64_t{5}, INT64_MAX})
    refuse_run(
        ("query_table runs from 0 to " + std::to_string(end) + "; there are rows 0 to 4").c_str(),
        [&](AttentionArgs& r, Paged& p) { rows(r, p, 2), p.numbers[1] = end; }, ranges);
  for (const std::int64_t begin : {std::int64_t{-1}, std::int64_t{1}, INT64_MIN})
    refuse_run(
        ("query_table runs from " + std::to_string(begin) + " to 4; there are rows 0 to").c_str(),
        [&](AttentionArgs& r, Paged& p) { rows(r, p, 2), p.numbers[0] = begin; }, ranges);
  refuse_run(
      "queries are listed, and there is no query_table: the position of each",
      [&](AttentionArgs& r, Paged& p) { rows(r, p, 4), r.query_table = {}; }, listed);
  refuse_run(  // whose table the others wait for
      "queries are listed, and there is no query_table: the position of each",
      [&](AttentionArgs& r, Paged& p) {
        rows(r, p, 4), r.query_table = {}, r.q.shape[0] = r.out.shape[0] = 0;
      },
      listed);
  for (const std::int64_t position : {std::int64_t{-1}, std::int64_t{4}, INT64_MAX, INT64_MIN})
    refuse_run(("query_table[1] is " + std::to_string(position) + "; of 4 rows").c_str(),
               [&](AttentionArgs& r, Paged& p) {
                 rows(r, p, 4), p.numbers = {0, position, 2, 3};
               },
               listed);
  refuse_run(
      "query_table[3] is 1; of 4 rows (total_tokens) this rank has 3, and past them stands -1",
      [&](AttentionArgs& r, Paged& p) {
        rows(r, p, 4), p.numbers = {3, 2, 0, 1}, r.q.shape[0] = r.out.shape[0] = 3;
      },
      listed);
  refuse_run(
      "query_table: position 1 is listed by no rank",
      [&](AttentionArgs& r, Paged& p) {
        rows(r, p, 4), p.numbers = {0, 2, 2, 3};
      },
      listed);
  refuse_run(
      "query_table is [3]; [4] is wanted", [&](AttentionArgs& r, Paged& p) { rows(r, p, 3); },
      listed);
  refuse_run(
      "query_table is int32; int64 is wanted",
      [&](AttentionArgs& r, Paged& p) {
        rows(r, p, 4), r.query_table = Tensor(p.table.data(), {4});
      },
      listed);
  refuse_run(
      "query_table is on the cuda",
      [&](AttentionArgs& r, Paged& p) { rows(r, p, 4), r.query_table.device = Device::cuda; },
      listed);
  refuse_run(
      "query_table is given, and queries are striped, which takes no table",
      [&](AttentionArgs& r, Paged& p) { rows(r, p, 2); }, with_queries(Layout::striped));

  // All rows in any order are the rows.
  Paged plain, by_ranges, by_list;
  Attention(self(), options()).run(plain.one_sequence());
  AttentionArgs a;
  rows(a, by_ranges, 2);
  Attention(self(), ranges).run(a);
  EXPECT_EQ(by_ranges.out, plain.out);
  rows(a, by_list, 4), by_list.numbers = {0, 1, 2, 3};
  Attention(self(), listed).run(a);
  EXPECT_EQ(by_list.out, plain.out);
}

TEST(Validate, TheShardOfALayer) {
  Options o = options();
  o.keys = {Layout::interleaved, 64};
  const Attention layer(self(), o);
  const Shard shard = layer.shard(1000);
  EXPECT_EQ(shard.layout, Layout::interleaved);
  EXPECT_EQ(shard.block, 64);
  EXPECT_EQ(shard.length, 1000);
  EXPECT_EQ(shard.rank, 0);
  EXPECT_EQ(shard.ranks, 1);
  expect_refused<InputError>("a shard has length -1", [&] { layer.shard(-1); });
  for (const Layout layout : {Layout::ranges, Layout::listed}) {
    const Attention with_table(self(), with_keys(layout));
    expect_refused<UsageError>(std::string("the keys of this layer are ") + name(layout),
                               [&] { with_table.shard(1000); });
  }
}

// ---- small arrays ------------------------------------------------------------------------------

/// One of the small vectors of a run, and a valid one.
struct Vector {
  const char* name;
  Tensor AttentionArgs::*field;
  DType dtype;
  std::int64_t extent;
  bool any_float = false;
  bool may_be_one = false;  // [1] fits too
};

const Vector kVectors[] = {
    {"query_start", &AttentionArgs::query_start, DType::int32, 3},
    {"kv_len", &AttentionArgs::kv_len, DType::int32, 2},
    {"causal", &AttentionArgs::causal, DType::uint8, 2},
    {"sinks", &AttentionArgs::sinks, fp32, kHeads, true},
    {"slopes", &AttentionArgs::slopes, fp32, kHeads, true},
    {"q_scale", &AttentionArgs::q_scale, fp32, kKvHeads, false, true},
    {"k_scale", &AttentionArgs::k_scale, fp32, kKvHeads, false, true},
    {"v_scale", &AttentionArgs::v_scale, fp32, kKvHeads, false, true},
    {"out_scale", &AttentionArgs::out_scale, fp32, 1},
};

/// All of them, one value each.
struct AllVectors {
  std::vector<float> ones = std::vector<float>(16, 1.0f);
  std::vector<std::uint8_t> flags = std::vector<std::uint8_t>(16, 1);

  void give(AttentionArgs& a) {
    a.causal = Tensor(flags.data(), {2});
    a.sinks = a.slopes = Tensor(ones.data(), {kHeads});
    a.q_scale = a.k_scale = a.v_scale = Tensor(ones.data(), {kKvHeads});
    a.out_scale = Tensor(ones.data(), {1});
  }
};

TEST(Validate, SmallArraysThatFit) {
  AllVectors vectors;
  Attention layer(self(), options());
  Paged p;
  AttentionArgs a = p.args();
  vectors.give(a);
  layer.run(a);
  const std::vector<float> plain = p.out;
  EXPECT_FALSE(std::isnan(plain.back()));
  for (const Vector& v : kVectors) {
    if (v.may_be_one) {
      Tensor& t = a.*v.field;
      t.shape[0] = 1, t.stride[0] = 7;  // which reaches nothing
      layer.run(a);
      EXPECT_EQ(p.out, plain) << v.name;
    }
    if (!v.any_float) continue;
    for (const DType dtype : {fp16, bf16, e4m3, e5m2}) {
      std::vector<std::byte> ones(kHeads * size_of(dtype));
      for (int i = 0; i < kHeads; ++i) store_element(ones.data(), dtype, i, 1.0f);
      const Tensor before = a.*v.field;
      a.*v.field = Tensor(ones.data(), dtype, {kHeads});
      layer.run(a);
      EXPECT_EQ(p.out, plain) << v.name << " " << name(dtype);
      a.*v.field = before;
    }
  }
}

TEST(Validate, SmallArraysThatDoNot) {
  AllVectors vectors;
  for (const Vector& v : kVectors) {
    const std::string name = v.name, number = std::to_string(v.extent);
    const auto refuse = [&](const std::string& text, const std::function<void(Tensor&)>& change) {
      refuse_run(text.c_str(), [&](AttentionArgs& a, Paged&) {
        vectors.give(a);
        change(a.*v.field);
      });
    };
    const bool says_batch = name == "kv_len";  // its extent is the batch
    for (const DType dtype : {fp32, fp16, DType::int32, DType::int64, DType::uint8}) {
      if (dtype == v.dtype || (v.any_float && is_float(dtype))) continue;
      refuse(name + " is " + longspan::name(dtype) + "; " +
                 (v.any_float ? "fp32, fp16, bf16 or fp8" : longspan::name(v.dtype)) + " is wanted",
             [&](Tensor& t) { t.dtype = dtype; });
    }
    refuse(name + (v.any_float ? " is no type; fp32, fp16, bf16 or fp8"
                               : " has a type of number 200, which does not exist"),
           [](Tensor& t) { t.dtype = static_cast<DType>(200); });
    for (const std::int64_t extent : {v.extent + 1, v.extent - 1, std::int64_t{0}}) {
      if (says_batch || (v.may_be_one && extent == 1)) continue;
      refuse(name + " is [" + std::to_string(extent) + "]; [" + number + "] is wanted",
             [&](Tensor& t) { t.shape[0] = extent; });
    }
    const bool may_be_of_sequences = v.may_be_one && name.ends_with("_scale");
    refuse(name + " is [" + number + ", 1]; [" +
               (says_batch            ? "batch"
                : may_be_of_sequences ? "1], [" + number + "] or [2, " + number
                                      : number) +
               "]",
           [&](Tensor& t) { t.dims = 2, t.shape[1] = t.stride[1] = 1; });
    refuse(name + " is on the cuda; the work is done on the host",
           [](Tensor& t) { t.device = Device::cuda; });
    refuse(name + " [" + number + "] has stride -1", [](Tensor& t) { t.stride[0] = -1; });
    if (v.extent > 1)
      for (const std::int64_t stride : {0, 2})
        refuse(name + " has stride " + std::to_string(stride) + "; it must be dense",
               [&](Tensor& t) { t.stride[0] = stride; });
    if (size_of(v.dtype) > 1)
      refuse(name + " [" + number + "] lies at",
             [](Tensor& t) { t.data = static_cast<std::byte*>(t.data) + 1; });
    if (name != "kv_len") continue;
    refuse("query_start is [3]; [2] is wanted", [](Tensor& t) { t.shape[0] = 1; });
  }
}

/// Null memory does not mean a missing array.
TEST(Validate, SmallArraysWithoutData) {
  AllVectors vectors;
  for (const Vector& v : kVectors) {
    const std::string name = v.name;
    const std::string text = name == "query_start"
                                 ? "a batch of 2 sequences needs query_start"
                                 : name + " [" + std::to_string(v.extent) + "] has no data";
    refuse_run(text.c_str(), [&](AttentionArgs& a, Paged&) {
      vectors.give(a);
      (a.*v.field).data = nullptr;
    });
  }
}

/// The longest sequence has 33 keys, so the tables need 33 positions.
struct RopeArrays {
  std::vector<float> numbers = std::vector<float>(40 * 9, 0.5f);

  Tensor table(std::int64_t positions, std::int64_t columns = 8) const {
    return Tensor(numbers.data(), {positions, columns}, {9, 1});
  }
};

TEST(Validate, TablesOfRope) {
  Options given = options();
  given.rope.dim = 16;
  const RopeArrays arrays;
  const auto refuse = [&](const char* text, const Tensor& cos, const Tensor& sin) {
    refuse_run(
        text, [&](AttentionArgs& a, Paged&) { a.rope_cos = cos, a.rope_sin = sin; }, given);
    Attention layer(self(), given);
    Paged p;
    Append append = p.append();
    append.rope_cos = cos, append.rope_sin = sin;
    const std::vector<float> before = p.k;
    expect_refused<InputError>(text, [&] { layer.append(append); });
    EXPECT_EQ(p.k, before);
  };
  const auto changed = [&](const std::function<void(Tensor&)>& change) {
    Tensor t = arrays.table(33);
    change(t);
    return t;
  };
  const Tensor good = arrays.table(33);
  refuse("rope_cos is given without rope_sin", good, {});
  refuse("rope_sin is given without rope_cos", {}, good);
  refuse("rope_cos and rope_sin have 32 positions and the rows of sequence 1 need 33",
         arrays.table(32), arrays.table(32));
  refuse("rope_cos has 33 positions and rope_sin has 34", good, arrays.table(34));
  refuse("rope_cos is [33, 7]; [positions, 8] is wanted", arrays.table(33, 7), good);
  refuse("rope_sin is [0, 8]; [positions, 8] is wanted", good, arrays.table(0));
  refuse("rope_cos is [33]; [positions, 8] is wanted", changed([](Tensor& t) { t.dims = 1; }),
         good);
  refuse("rope_cos is int32; fp32, fp16 or bf16 is wanted",
         changed([](Tensor& t) { t.dtype = DType::int32; }), good);
  refuse("rope_sin is e4m3; fp32, fp16 or bf16 is wanted", good,
         changed([](Tensor& t) { t.dtype = e4m3; }));
  refuse("rope_cos is on the cuda", changed([](Tensor& t) { t.device = Device::cuda; }), good);
  refuse("rope_cos has stride 2 in its last dimension", changed([](Tensor& t) {
           t.stride = {18, 2};
         }),
         good);
  refuse("rope_cos [33, 8] has no data", changed([](Tensor& t) { t.data = nullptr; }), good);
  refuse_run("rope_cos and rope_sin are given, and the layer has no RoPE",
             [&](AttentionArgs& a, Paged&) { a.rope_cos = a.rope_sin = good; });

  Attention layer(self(), given);
  Paged p;
  AttentionArgs run = p.args();
  run.rope_cos = run.rope_sin = good;
  layer.run(run);
  EXPECT_FALSE(std::isnan(p.out.back()));
  EXPECT_GE(layer.workspace_bytes(),
            Attention(self(), options()).workspace_bytes() + kTokens * kHeads * kDim * 4);
}

TEST(Validate, ScalesOfFp8) {
  Options fp8 = options();
  fp8.dtypes.kv = e4m3;
  const auto caches = [](AttentionArgs& r) { r.k.dtype = r.v.dtype = e4m3; };
  refuse_run(
      "k is fp32; e4m3 is wanted", [](AttentionArgs&, Paged&) {}, fp8);
  refuse_run(
      "k is e4m3 and there is no k_scale", [&](AttentionArgs& r, Paged&) { caches(r); }, fp8);
  refuse_run(
      "v is e4m3 and there is no v_scale",
      [&](AttentionArgs& r, Paged& p) { caches(r), r.k_scale = Tensor(p.one.data(), {1}); }, fp8);
  fp8 = options();
  fp8.dtypes.query = e5m2;
  refuse_run(
      "q is e5m2 and there is no q_scale", [](AttentionArgs& r, Paged&) { r.q.dtype = e5m2; }, fp8);
  fp8 = options();
  fp8.dtypes.out = e4m3;
  refuse_run(
      "out is e4m3 and there is no out_scale", [](AttentionArgs& r, Paged&) { r.out.dtype = e4m3; },
      fp8);
  refuse_run(
      "out is fp32; e4m3 is wanted", [](AttentionArgs&, Paged&) {}, fp8);
}

TEST(Validate, FeaturesOfARun) {
  const auto bias = [](AttentionArgs& r, Paged& p, std::int64_t width, std::int64_t row_stride) {
    r.qq_bias = Tensor(p.qq.data(), {width, width});
    r.qq_bias.stride[0] = row_stride;
  };
  refuse_run("qq_bias is [0, 0]; a matrix [width, width] of at least 1 is wanted",
             [&](AttentionArgs& r, Paged& p) { bias(r, p, 0, 3); });
  refuse_run("qq_bias is [3, 2]; a matrix",
             [&](AttentionArgs& r, Paged& p) { bias(r, p, 3, 3), r.qq_bias.shape[1] = 2; });
  refuse_run("qq_bias is [3]; a matrix",
             [&](AttentionArgs& r, Paged& p) { bias(r, p, 3, 3), r.qq_bias.dims = 1; });
  refuse_run("rows of 3 entries and a row stride of 2",
             [&](AttentionArgs& r, Paged& p) { bias(r, p, 3, 2); });
  refuse_run("qq_bias has stride 3 in its last dimension; it must be 1",
             [&](AttentionArgs& r, Paged& p) { bias(r, p, 3, 3), r.qq_bias.stride[1] = 3; });
  refuse_run("qq_bias has width 3 and a row stride of 1099511627777; at most 2^40",
             [&](AttentionArgs& r, Paged& p) { bias(r, p, 3, (std::int64_t{1} << 40) + 1); });
  refuse_run("qq_bias is int32; fp32, fp16, bf16 or fp8 is wanted",
             [&](AttentionArgs& r, Paged& p) { bias(r, p, 3, 3), r.qq_bias.dtype = DType::int32; });
  refuse_run("qq_bias is on the cuda", [&](AttentionArgs& r, Paged& p) {
    bias(r, p, 3, 3), r.qq_bias.device = Device::cuda;
  });
  refuse_run("sequence 1 has 3 query rows; qq_bias is wide enough for 2",
             [&](AttentionArgs& r, Paged& p) { bias(r, p, 2, 3); });
  refuse_run("qq_bias is [3, 3]; a query of 4 tokens needs [4, 4] at least",
             [&](AttentionArgs& r, Paged& p) { r = p.one_sequence(), bias(r, p, 3, 3); });
  const auto slopes = [](AttentionArgs& r, Paged& p, std::int64_t batch, std::int64_t heads) {
    r.slopes = Tensor(p.q.data(), {batch, heads});
  };
  refuse_run("slopes is [3, 4]; [4] or [2, 4] is wanted",
             [&](AttentionArgs& r, Paged& p) { slopes(r, p, 3, kHeads); });
  refuse_run("slopes is [2, 3]; [4] or [2, 4] is wanted",
             [&](AttentionArgs& r, Paged& p) { slopes(r, p, 2, 3); });
  refuse_run("slopes has strides 5 and 1; it must be dense",
             [&](AttentionArgs& r, Paged& p) { slopes(r, p, 2, kHeads), r.slopes.stride[0] = 5; });
  refuse_run("slopes is int32; fp32, fp16, bf16 or fp8 is wanted", [&](AttentionArgs& r, Paged& p) {
    slopes(r, p, 2, kHeads), r.slopes.dtype = DType::int32;
  });
  refuse_run("slopes[7] is inf; an ALiBi slope is a finite number",
             [&](AttentionArgs& r, Paged& p) { slopes(r, p, 2, kHeads), p.q[7] = INFINITY; });
  refuse_run("documents is [2]; the batch has 2 sequences: [2, count + 1] is wanted",
             [](AttentionArgs& r, Paged& p) { r.documents = Tensor(p.numbers.data(), {2}); });
  refuse_run("documents is [3, 1]; the batch has 2 sequences", [](AttentionArgs& r, Paged& p) {
    r.documents = Tensor(p.numbers.data(), {3, 1});
  });
  refuse_run("documents descend at document 0 of sequence 1: 40 to 33",
             [](AttentionArgs& r, Paged& p) {
               r.documents = Tensor(p.numbers.data(), {2, 2}), p.numbers[2] = 40;
             });
  const auto ranges = [](std::vector<std::int64_t> bounds, auto... shape) {
    return [=](AttentionArgs& r, Paged& p) {
      p.numbers = bounds;
      r.bidirectional = Tensor(p.numbers.data(), {shape...});
    };
  };
  refuse_run("bidirectional is [2]; [count, 2] is wanted, or [batch, count, 2]", ranges({0, 1}, 2));
  refuse_run("bidirectional is [1, 2]; the batch has 2 sequences: [2, count, 2] is wanted",
             ranges({0, 1}, 1, 2));
  refuse_run("bidirectional is [2, 1, 3]; [count, 2] is wanted",
             ranges({0, 1, 2, 0, 1, 2}, 2, 1, 3));
  refuse_run("bidirectional range 0 of sequence 1 is [9, 3), which ends before it begins",
             ranges({0, 1, 9, 3}, 2, 1, 2));
  refuse_run(
      "bidirectional range 1 of sequence 0 is [18, 21); the sequence has the positions [0, 20)",
      ranges({0, 1, 18, 21, 0, 0, 33, 33}, 2, 2, 2));
  refuse_run(
      "bidirectional range 1 of sequence 1 is [4, 8), and the one before it ends at 5: ranges "
      "ascend and do not overlap",
      ranges({0, 1, 18, 20, 2, 5, 4, 8}, 2, 2, 2));
  refuse_run("bidirectional [2, 2, 2] has gaps", [&](AttentionArgs& r, Paged& p) {
    ranges({0, 1, 18, 20, 2, 5, 6, 8}, 2, 2, 2)(r, p), r.bidirectional.stride[1] = 3;
  });
  const auto vector = [](Tensor AttentionArgs::*field, std::int32_t first, std::int32_t second) {
    return [=](AttentionArgs& r, Paged& p) {
      p.padding = {first, second};
      r.*field = Tensor(p.padding.data(), {2});
    };
  };
  refuse_run("prefix_len is given, and the layer's mask has no prefix",
             vector(&AttentionArgs::prefix_len, 1, 1));
  refuse_run("left_padding[0] is -1; the sequence has 20 keys, so it is 0 to 20",
             vector(&AttentionArgs::left_padding, -1, 0));
  refuse_run("left_padding[1] is 34; the sequence has 33 keys",
             vector(&AttentionArgs::left_padding, 20, 34));
  refuse_run("query_len[1] is -1; the sequence has 3 query rows, so it is 0 to 3",
             vector(&AttentionArgs::query_len, 1, -1));
  refuse_run("query_len[0] is 2; the sequence has 1 query rows",
             vector(&AttentionArgs::query_len, 2, 0));
  refuse_run("query_len is [1]; [2] is wanted", [&](AttentionArgs& r, Paged& p) {
    vector(&AttentionArgs::query_len, 1, 1)(r, p), r.query_len.shape[0] = 1;
  });
  refuse_run("left_padding is int64; int32 is wanted",
             [](AttentionArgs& r, Paged& p) { r.left_padding = Tensor(p.numbers.data(), {2}); });
  refuse_run<Unsupported>("query_len with new_k is not supported", [&](AttentionArgs& r, Paged& p) {
    vector(&AttentionArgs::query_len, 1, 1)(r, p);
    r.new_k = p.append().new_k, r.new_v = p.append().new_v;
  });
  const auto documents = [](AttentionArgs& r, Paged& p) {
    r = p.one_sequence(), r.documents = Tensor(p.numbers.data(), {4});
  };
  refuse_run("documents descend at document 1: 20 to 0", documents);
  refuse_run("documents is [0]; it has the start of each, and the end of the last",
             [&](AttentionArgs& r, Paged& p) { documents(r, p), r.documents.shape[0] = 0; });
  refuse_run("documents is [1, 2, 2]; [count + 1] is wanted, or [batch, count + 1]",
             [&](AttentionArgs& r, Paged& p) {
               documents(r, p), r.documents = Tensor(p.numbers.data(), {1, 2, 2});
             });
  refuse_run("documents is int32; int64 is wanted", [&](AttentionArgs& r, Paged& p) {
    documents(r, p), r.documents.dtype = DType::int32;
  });
  refuse_run("documents has stride 2 in its last dimension; it must be 1",
             [&](AttentionArgs& r, Paged& p) { documents(r, p), r.documents.stride[0] = 2; });
  refuse_run("documents is on the cuda", [&](AttentionArgs& r, Paged& p) {
    documents(r, p), r.documents.device = Device::cuda;
  });
  refuse_run<Unsupported>(
      "skip_decode with sharded queries",
      [](AttentionArgs& r, Paged&) { r.skip_decode = true, r.total_tokens = kTokens; },
      with_queries(Layout::contiguous));
  refuse_run("lse is [4, 3] (tokens, heads); [4, 4] is wanted", [](AttentionArgs& r, Paged& p) {
    r.lse = Lse::heads_tokens(Tensor(p.out.data(), {3, kTokens}));
  });
}

TEST(Validate, Appends) {
  const auto refuse = [](const char* text, const std::function<void(Append&, Paged&)>& change,
                         auto error, const Options& given = options()) {
    Attention layer(self(), given);
    Paged p;
    Append a = p.append();
    change(a, p);
    const std::vector<float> before = p.k;
    expect_refused<decltype(error)>(text, [&] { layer.append(a); });
    EXPECT_EQ(p.k, before) << text;
  };
  const InputError input("");
  refuse(
      "new_k is [4, 2, 16]", [](Append& a, Paged&) { a.new_k.shape[2] = 16; }, input);
  refuse(
      "new_v is [3, 2, 32]; [4, 2, 32]", [](Append& a, Paged&) { a.new_v.shape[0] = 3; }, input);
  refuse(
      "k is e4m3; fp32 is wanted", [](Append& a, Paged&) { a.k.dtype = e4m3; }, input);
  refuse(
      "sequence 1 gets 3 new keys and has kv_len 2", [](Append&, Paged& p) { p.kv_len[1] = 2; },
      input);
  refuse(
      "block_table[1][2] is -1", [](Append&, Paged& p) { p.table[6] = -1; }, input);
  refuse(
      "slots must differ", [](Append&, Paged& p) { p.table[5] = 2, p.kv_len[1] = 21; }, input);
  refuse(
      "there is room for 64", [](Append&, Paged& p) { p.kv_len[0] = 65; }, input);
  refuse(
      "append to listed keys",
      [](Append& a, Paged& p) {
        a.query_start = {}, a.kv_len = Tensor(p.kv_len.data() + 1, {1});
        a.key_table = Tensor(p.numbers.data(), {4});
      },
      Unsupported(""), with_keys(Layout::listed));
  refuse(
      "a batch of 2 sequences needs query_start", [](Append& a, Paged&) { a.query_start = {}; },
      input);
  refuse(
      "query_start is [2]; [3] is wanted", [](Append& a, Paged&) { a.query_start.shape[0] = 2; },
      input);
  refuse(
      "kv_len is [3]: 3 sequences; the layer was made for 1 to 2",
      [](Append& a, Paged&) { a.kv_len.shape[0] = 3; }, input);
  refuse(
      "kv_len is int64; int32 is wanted", [](Append& a, Paged&) { a.kv_len.dtype = DType::int64; },
      input);
  refuse(
      "total_keys is 33 and kv_len is given", [](Append& a, Paged&) { a.total_keys = 33; }, input);
  refuse(
      "key_table is given, and keys are contiguous",
      [](Append& a, Paged& p) {
        a.key_table = Tensor(p.numbers.data(), {2, 2});
      },
      input);
  refuse(
      "keys are ranges, and there is no key_table", [](Append&, Paged&) {}, input,
      with_keys(Layout::ranges));
  refuse(
      "the table of ranges of sequence 1 runs from 0 to 32",
      [](Append& a, Paged& p) {
        a.key_table = Tensor(p.numbers.data(), {2, 2}), p.numbers[3] = 32;
      },
      input, with_keys(Layout::ranges));
  refuse(
      "k_scale is [3]; [2] is wanted",
      [](Append& a, Paged& p) { a.k_scale = Tensor(p.qq.data(), {3}); }, input);
  refuse(
      "v_scale is on the cuda",
      [](Append& a, Paged& p) { a.v_scale = Tensor(p.one.data(), {1}, Device::cuda); }, input);
  refuse(
      "v_scale[0] is 0; a scale is a finite number, and not 0",
      [](Append& a, Paged& p) { a.v_scale = Tensor(p.qq.data(), {1}); }, input);
  refuse(
      "block_table is [1, 4]; [2, columns] is wanted",
      [](Append& a, Paged&) { a.block_table.shape[0] = 1; }, input);

  Attention layer(self(), options());
  Paged p;
  layer.append(p.append());
  int written = 0;
  for (std::size_t i = 0; i < p.k.size(); i += kKvHeads * kDim) written += p.k[i] == 1.0f;
  EXPECT_EQ(written, kTokens);
  EXPECT_EQ(p.k[(3 * kPage) * kKvHeads * kDim], 1.0f);  // position 32 of sequence 1
}

TEST(Validate, NewKeysOfARun) {
  const auto refuse = [](const char* text,
                         const std::function<void(AttentionArgs&, Paged&)>& change) {
    refuse_run(text, [&](AttentionArgs& r, Paged& p) {
      r.new_k = p.append().new_k;
      r.new_v = p.append().new_v;
      change(r, p);
    });
  };
  refuse("new_v is [4, 2, 32]; [3, 2, 32]", [](AttentionArgs& r, Paged&) { r.new_k.shape[0] = 3; });
  refuse("new_k has 3 rows; there are 4 of q", [](AttentionArgs& r, Paged& p) {
    r.new_k.shape[0] = r.new_v.shape[0] = p.query_start[2] = 3;
  });
  refuse("new_v [] has no data", [](AttentionArgs& r, Paged&) { r.new_v = {}; });
  refuse("new_k [] has no data", [](AttentionArgs& r, Paged&) { r.new_k = {}; });
  refuse("new_k is [4, 2, 16]", [](AttentionArgs& r, Paged&) { r.new_k.shape[2] = 16; });
  refuse("sequence 1 gets 3 new keys and has kv_len 2",
         [](AttentionArgs&, Paged& p) { p.kv_len[1] = 2; });
  refuse("slots must differ", [](AttentionArgs&, Paged& p) { p.table[5] = 2, p.kv_len[1] = 21; });
  refuse("block_table[1][2] is -1", [](AttentionArgs&, Paged& p) { p.table[6] = -1; });
  refuse_run<Unsupported>(
      "append to listed keys",
      [](AttentionArgs& r, Paged& p) {
        r = p.one_sequence(), r.key_table = Tensor(p.numbers.data(), {4});
        r.new_k = p.append().new_k, r.new_v = p.append().new_v;
      },
      with_keys(Layout::listed));
  // Errors in the rest of the run are found before anything is written.
  refuse("qq_bias is [0, 0]", [](AttentionArgs& r, Paged& p) {
    r.qq_bias = Tensor(p.qq.data(), {0, 0});
  });

  Attention layer(self(), options());
  Paged apart, together;
  layer.append(apart.append());
  layer.run(apart.args());
  AttentionArgs r = together.args();
  r.new_k = together.append().new_k;
  r.new_v = together.append().new_v;
  layer.run(r);
  EXPECT_EQ(together.k, apart.k);
  EXPECT_EQ(together.v, apart.v);
  EXPECT_EQ(together.out, apart.out);
  EXPECT_NE(together.out[0], 0.25f);
}

}  // namespace
}  // namespace longspan
