// What the layer refuses, by name and with nothing written: options, requests over a paged or
// quantised cache, and appends. And that ranks compare every option.
#include "src/validate.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "longspan/attention.hpp"
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
          .dtype = fp32,
          .mask = {.causal = true},
          .max_tokens = kTokens,
          .max_batch = 2,
          .threads = 1};
}

TEST(Validate, OptionsThatMakeNoSense) {
  const auto refuse = [](const char* text, const std::function<void(Options&)>& change) {
    Options o = options();
    change(o);
    expect_refused<UsageError>(text, [&] { check_options(o); });
  };
  check_options(options());
  refuse("products are of fp32, fp16 or bf16", [](Options& o) { o.dtype = e4m3; });
  refuse("query_dtype bf16: it is dtype (fp32) or fp8", [](Options& o) { o.query_dtype = bf16; });
  refuse("kv_dtype fp16: it is dtype (fp32) or fp8", [](Options& o) { o.kv_dtype = fp16; });
  refuse("out_dtype bf16: it is dtype (fp32) or fp8", [](Options& o) { o.out_dtype = bf16; });
  refuse("tf32 is a way to make fp32 products", [](Options& o) { o.dtype = bf16, o.tf32 = true; });
  const auto fp8 = [](Options& o) {
    o.dtype = bf16, o.query_dtype = o.kv_dtype = e4m3, o.head_dim = 64, o.fp8_products = true;
  };
  Options taken = options();
  fp8(taken);
  check_options(taken);
  refuse("query_dtype is bf16 and kv_dtype is e4m3: give both as e4m3",
         [&](Options& o) { fp8(o), o.query_dtype = {}; });
  refuse("query_dtype is e4m3 and kv_dtype is e5m2: give both as e4m3",
         [&](Options& o) { fp8(o), o.kv_dtype = e5m2; });
  refuse("fp8_products with dtype fp32: take bf16", [&](Options& o) { fp8(o), o.dtype = fp32; });
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
  taken.softcap = 30;
  expect_refused<Unsupported>("fp8_products with softcap 30", [&] { check_options(taken); });
  refuse("max_kv_len -1", [](Options& o) { o.max_kv_len = -1; });
  refuse("max_query_len -1", [](Options& o) { o.max_query_len = -1; });
  refuse("exchange of number 4 is none of automatic, windows, windows_apart, gather",
         [](Options& o) { o.exchange = static_cast<Exchange>(4); });
  for (const int dim : {-8, 0, 4, 12, 584}) {
    Options o = options();
    o.head_dim = dim;
    expect_refused<Unsupported>("head_dim " + std::to_string(dim), [&] { check_options(o); });
  }
  for (const int dim : {-8, 0, 4, 12, 520}) {
    Options o = options();
    o.value_dim = dim;
    expect_refused<Unsupported>("value_dim " + std::to_string(dim), [&] { check_options(o); });
  }
  for (const auto& [head_dim, value_dim] : {std::pair{8, 512}, {192, 128}, {576, 512}}) {
    Options o = options();
    o.head_dim = head_dim, o.value_dim = value_dim;
    EXPECT_NO_THROW(check_options(o)) << head_dim;
  }
  refuse("softcap -1", [](Options& o) { o.softcap = -1; });
  refuse("softcap is nan; it is a finite number", [](Options& o) { o.softcap = NAN; });
  refuse("softcap is inf", [](Options& o) { o.softcap = INFINITY; });
  refuse("scale is nan; it is a finite number", [](Options& o) { o.scale = NAN; });
  refuse("scale is -inf", [](Options& o) { o.scale = -INFINITY; });
  refuse("window -1", [](Options& o) { o.mask.window = -1; });
  refuse("window 9223372036854775807 is beyond", [](Options& o) { o.mask.window = INT64_MAX; });
  refuse("right -2", [](Options& o) { o.mask.right = -2; });
  refuse("right 9223372036854775807 is beyond", [](Options& o) { o.mask.right = INT64_MAX; });
  refuse("max_query_len 9223372036854775807", [](Options& o) { o.max_query_len = INT64_MAX; });
  refuse("max_tokens 9223372036854775807", [](Options& o) { o.max_tokens = INT64_MAX; });
  refuse("max_batch 0", [](Options& o) { o.max_batch = 0; });
  refuse("heads 0", [](Options& o) { o.heads = 0; });
  refuse("kv_heads 0", [](Options& o) { o.kv_heads = 0; });
  refuse("query_dtype no type", [](Options& o) { o.query_dtype = static_cast<DType>(9); });
  refuse("alibi of number 7", [](Options& o) { o.alibi = static_cast<Alibi>(7); });
  refuse("threads -1", [](Options& o) { o.threads = -1; });
  // No rank has so much memory, and no size of it may wrap.
  refuse("the states of such a run take", [](Options& o) {
    o.heads = o.kv_heads = std::numeric_limits<int>::max(), o.max_tokens = 1 << 30;
  });
  Options large = options();
  large.max_tokens = std::numeric_limits<std::int32_t>::max(), large.shard_queries = true;
  expect_refused<UsageError>("on 1000 ranks", [&] { check_options(large, 1000); });
}

/// Rows of queries of any size travel.
TEST(Validate, ShardedQueriesOfAnySize) {
  for (int heads : {1, 3, 5})
    for (int dim : {16, 24, 40})
      for (DType dtype : {e4m3, e5m2, bf16}) {
        Options o{.heads = heads, .kv_heads = 1, .head_dim = dim, .shard_queries = true};
        o.query_dtype = dtype;
        EXPECT_NO_THROW(check_options(o, 3));
      }
}

TEST(Validate, RanksCompareEveryOption) {
  const std::vector<std::pair<const char*, std::function<void(Options&)>>> changes{
      {"heads", [](Options& o) { o.heads = 8; }},
      {"kv_heads", [](Options& o) { o.kv_heads = 1; }},
      {"head_dim", [](Options& o) { o.head_dim = 64; }},
      {"value_dim", [](Options& o) { o.value_dim = 64; }},
      {"dtype", [](Options& o) { o.dtype = fp16; }},
      {"query_dtype", [](Options& o) { o.query_dtype = e4m3; }},
      {"kv_dtype", [](Options& o) { o.kv_dtype = e5m2; }},
      {"out_dtype", [](Options& o) { o.out_dtype = e4m3; }},
      {"tf32", [](Options& o) { o.tf32 = true; }},
      {"fp8_products", [](Options& o) { o.fp8_products = true; }},
      {"causal", [](Options& o) { o.mask.causal = false; }},
      {"window", [](Options& o) { o.mask.window = 3; }},
      {"right", [](Options& o) { o.mask.right = 3; }},
      {"scale", [](Options& o) { o.scale = 0.5f; }},
      {"softcap", [](Options& o) { o.softcap = 30; }},
      {"alibi", [](Options& o) { o.alibi = Alibi::query; }},
      {"max_tokens", [](Options& o) { o.max_tokens = 9; }},
      {"max_batch", [](Options& o) { o.max_batch = 9; }},
      {"max_kv_len", [](Options& o) { o.max_kv_len = 9; }},
      {"max_query_len", [](Options& o) { o.max_query_len = 9; }},
      {"shard_queries", [](Options& o) { o.shard_queries = true; }},
      {"invariant", [](Options& o) { o.invariant = true; }},
      {"strategy", [](Options& o) { o.strategy = "gather-states"; }},
      {"exchange", [](Options& o) { o.exchange = Exchange::gather; }},
      {"check_arrays", [](Options& o) { o.check_arrays = true; }},
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

/// A layer over a paged cache of one process, and a batch that fits it.
struct Paged {
  std::vector<float> q = std::vector<float>(kTokens * kHeads * kDim, 0.5f);
  std::vector<float> k = std::vector<float>(kPages * kPage * kKvHeads * kDim, 0.25f), v = k;
  std::vector<float> out = std::vector<float>(q.size(), NAN);
  std::vector<std::int32_t> table{7, 2, -1, -1, 0, 5, 3, -1};
  std::vector<std::int32_t> query_start{0, 1, 4}, kv_len{20, 33};
  std::vector<float> new_k = std::vector<float>(kTokens * kKvHeads * kDim, 1.0f), new_v = new_k;
  std::vector<float> one{1.0f}, qq = std::vector<float>(9, 0.0f);
  std::vector<std::int64_t> numbers{0, 20, 0, 33};

  Tensor pages(std::vector<float>& data, DType dtype = fp32) {
    return Tensor(data.data(), dtype, {kPages, kPage, kKvHeads, kDim});
  }
  Request request() {
    return {.q = Tensor(q.data(), fp32, {kTokens, kHeads, kDim}),
            .k = pages(k),
            .v = pages(v),
            .shard = Shard::contiguous(0, 0, 1),
            .out = Tensor(out.data(), fp32, {kTokens, kHeads, kDim}),
            .batch = 2,
            .query_start = query_start.data(),
            .kv_len = kv_len.data(),
            .block_table = {table.data(), 4}};
  }
  Append append() {
    return {.new_k = Tensor(new_k.data(), fp32, {kTokens, kKvHeads, kDim}),
            .new_v = Tensor(new_v.data(), fp32, {kTokens, kKvHeads, kDim}),
            .k = pages(k),
            .v = pages(v),
            .block_table = {table.data(), 4},
            .shard = Shard::contiguous(0, 0, 1),
            .batch = 2,
            .query_start = query_start.data(),
            .kv_len = kv_len.data()};
  }
};

template <class E = InputError>
void refuse_run(const char* text, const std::function<void(Request&, Paged&)>& change,
                const Options& given = options()) {
  Attention layer(self(), given);
  Paged p;
  Request r = p.request();
  change(r, p);
  const std::vector<float> before = p.k;
  expect_refused<E>(text, [&] { layer.run(r); });
  for (float value : p.out) ASSERT_TRUE(std::isnan(value)) << text;
  EXPECT_EQ(p.k, before) << text;
}

TEST(Validate, RunsOverAPagedCache) {
  Paged p;
  Attention layer(self(), options());
  layer.run(p.request());
  for (float value : p.out) ASSERT_FLOAT_EQ(value, 0.25f);
}

TEST(Validate, BlockTables) {
  refuse_run("block_table[1][2] is 9", [](Request&, Paged& p) { p.table[6] = 9; });
  refuse_run("block_table[0][1] is -1", [](Request&, Paged& p) { p.table[1] = -1; });
  refuse_run("there is room for 64 in its row of block_table",
             [](Request&, Paged& p) { p.kv_len[1] = 65; });
  refuse_run("there is room for 32 in its row of block_table",
             [](Request& r, Paged&) { r.block_table.columns = 2, r.block_table.row_stride = 4; });
  refuse_run("pages are [pages, page, 2, 32]", [](Request& r, Paged&) { r.k.shape[3] = 16; });
  refuse_run("k is [9, 2, 4, 16, 8]; [keys, 2, 32] is wanted, or [2, capacity, 2, 32], or pages",
             [](Request& r, Paged& p) {
               r.k = Tensor(p.k.data(), fp32, {kPages, kKvHeads, kDim / 8, kPage, 8});
               r.block_table = {};
             });
  Options promised = options();
  promised.max_kv_len = 32;
  refuse_run(
      "at most 32 were promised", [](Request&, Paged&) {}, promised);
}

TEST(Validate, LengthsOfABatch) {
  refuse_run("kv_len[1] is -3", [](Request&, Paged& p) { p.kv_len[1] = -3; });
  refuse_run("query_start[0] is 1", [](Request&, Paged& p) { p.query_start[0] = 1; });
  refuse_run("query_start descends at sequence 1",
             [](Request&, Paged& p) { p.query_start[1] = 5; });
  refuse_run("query_start ends at row 6", [](Request&, Paged& p) { p.query_start[2] = 6; });
  refuse_run("needs query_start and kv_len", [](Request& r, Paged&) { r.kv_len = nullptr; });
  refuse_run("the layer was made for 1 to 2", [](Request& r, Paged&) { r.batch = 3; });
}

TEST(Validate, ShardsWithTables) {
  const auto ranges = [](Request& r, Paged& p) {
    r.shard = Shard::ranges(0, 0, 1, p.numbers.data());
  };
  refuse_run("the table of ranges of sequence 1 runs from 0 to 32; the sequence has keys 0 to 33",
             [&](Request& r, Paged& p) { ranges(r, p), p.numbers[3] = 32; });
  refuse_run("the table of ranges of sequence 0 runs from 1",
             [&](Request& r, Paged& p) { ranges(r, p), p.numbers[0] = 1; });
  refuse_run("shard is listed, which describes one sequence", [](Request& r, Paged& p) {
    r.shard = Shard::at_positions(20, 0, 1, p.numbers.data(), 2);
  });
}

TEST(Validate, ScalesOfFp8) {
  Options fp8 = options();
  fp8.kv_dtype = e4m3;
  const auto caches = [](Request& r) { r.k.dtype = r.v.dtype = e4m3; };
  refuse_run(
      "k is fp32; e4m3 is wanted", [](Request&, Paged&) {}, fp8);
  refuse_run(
      "k is e4m3 and there is no k_scale", [&](Request& r, Paged&) { caches(r); }, fp8);
  refuse_run(
      "v is e4m3 and there is no v_scale",
      [&](Request& r, Paged& p) { caches(r), r.k_scale = {p.one.data()}; }, fp8);
  fp8 = options();
  fp8.query_dtype = e5m2;
  refuse_run(
      "q is e5m2 and there is no q_scale", [](Request& r, Paged&) { r.q.dtype = e5m2; }, fp8);
  fp8 = options();
  fp8.out_dtype = e4m3;
  refuse_run(
      "out is e4m3 and there is no out_scale", [](Request& r, Paged&) { r.out.dtype = e4m3; }, fp8);
  refuse_run(
      "out is fp32; e4m3 is wanted", [](Request&, Paged&) {}, fp8);
}

TEST(Validate, FeaturesOfARequest) {
  refuse_run("qq_bias has width 0", [](Request& r, Paged& p) { r.qq_bias = {p.qq.data(), 0, 3}; });
  refuse_run("rows of 3 entries and a row stride of 2", [](Request& r, Paged& p) {
    r.qq_bias = {p.qq.data(), 3, 2};
  });
  refuse_run("sequence 1 has 3 query rows; qq_bias is wide enough for 2", [](Request& r, Paged& p) {
    r.qq_bias = {p.qq.data(), 2, 3};
  });
  refuse_run("a query of 4 tokens needs [4, 4]", [](Request& r, Paged& p) {
    r.batch = 1, r.query_start = nullptr, r.qq_bias = {p.qq.data(), 3, 3};
  });
  refuse_run("documents are packed in one sequence", [](Request& r, Paged& p) {
    r.documents = {p.numbers.data(), 1};
  });
  refuse_run("documents descend at document 1: 20 to 0", [](Request& r, Paged& p) {
    r.batch = 1, r.query_start = nullptr, r.documents = {p.numbers.data(), 3};
  });
  Options sharded = options();
  sharded.shard_queries = true;
  refuse_run<Unsupported>(
      "skip_decode with shard_queries",
      [](Request& r, Paged&) {
        r.skip_decode = true;
        r.query_shard = Shard::contiguous(kTokens, 0, 1);
      },
      sharded);
}

TEST(Validate, Appends) {
  const auto refuse = [](const char* text, const std::function<void(Append&, Paged&)>& change,
                         auto error) {
    Attention layer(self(), options());
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
      "append to a listed shard",
      [](Append& a, Paged& p) {
        a.batch = 1, a.query_start = nullptr;
        a.shard = Shard::at_positions(33, 0, 1, p.numbers.data(), 4);
      },
      Unsupported(""));

  Attention layer(self(), options());
  Paged p;
  layer.append(p.append());
  int written = 0;
  for (std::size_t i = 0; i < p.k.size(); i += kKvHeads * kDim) written += p.k[i] == 1.0f;
  EXPECT_EQ(written, kTokens);
  EXPECT_EQ(p.k[(3 * kPage) * kKvHeads * kDim], 1.0f);  // position 32 of sequence 1
}

TEST(Validate, NewKeysOfARun) {
  const auto refuse = [](const char* text, const std::function<void(Request&, Paged&)>& change) {
    refuse_run(text, [&](Request& r, Paged& p) {
      r.new_k = p.append().new_k;
      r.new_v = p.append().new_v;
      change(r, p);
    });
  };
  refuse("new_v is [4, 2, 32]; [3, 2, 32]", [](Request& r, Paged&) { r.new_k.shape[0] = 3; });
  refuse("new_k has 3 rows; there are 4 of q",
         [](Request& r, Paged& p) { r.new_k.shape[0] = r.new_v.shape[0] = p.query_start[2] = 3; });
  refuse("new_v [] has no data", [](Request& r, Paged&) { r.new_v = {}; });
  refuse("new_k [] has no data", [](Request& r, Paged&) { r.new_k = {}; });
  refuse("new_k is [4, 2, 16]", [](Request& r, Paged&) { r.new_k.shape[2] = 16; });
  refuse("sequence 1 gets 3 new keys and has kv_len 2",
         [](Request&, Paged& p) { p.kv_len[1] = 2; });
  refuse("slots must differ", [](Request&, Paged& p) { p.table[5] = 2, p.kv_len[1] = 21; });
  refuse("block_table[1][2] is -1", [](Request&, Paged& p) { p.table[6] = -1; });
  refuse_run<Unsupported>("append to a listed shard", [](Request& r, Paged& p) {
    r.batch = 1, r.query_start = nullptr;
    r.shard = Shard::at_positions(33, 0, 1, p.numbers.data(), 4);
    r.new_k = p.append().new_k, r.new_v = p.append().new_v;
  });
  // What is wrong with the rest of the run is found before anything is written.
  refuse("qq_bias has width 0", [](Request& r, Paged& p) { r.qq_bias = {p.qq.data(), 0, 3}; });

  Attention layer(self(), options());
  Paged apart, together;
  layer.append(apart.append());
  layer.run(apart.request());
  Request r = together.request();
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
