// Class Kernels: what it refuses, by name and with nothing written, and that its calls agree with
// each other. Against float64 they are judged in the tests of serving.
#include "longspan/kernels.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "longspan/buffer.hpp"
#include "longspan/error.hpp"
#include "longspan/shard.hpp"

namespace longspan {
namespace {

using ::testing::HasSubstr;

constexpr int kHeads = 4, kKvHeads = 2, kDim = 32, kPage = 16, kPages = 9, kColumns = 4;
constexpr int kTokens = 4, kBatch = 2, kSegments = 3, kPadded = 40;

std::vector<float> random_floats(std::size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(n);
  for (float& value : values) value = normal(random);
  return values;
}

std::vector<float> nans(std::size_t n) { return std::vector<float>(n, NAN); }

/// Two sequences of 1 and 3 new tokens, 20 and 33 keys in all; what nobody needs is NaN or -1.
struct Problem {
  Kernels kernels{Device::host, 2};
  std::vector<float> q = random_floats(kTokens * kHeads * kDim, 1);
  std::vector<float> k_cache = random_floats(kPages * kPage * kKvHeads * kDim, 2);
  std::vector<float> v_cache = random_floats(kPages * kPage * kKvHeads * kDim, 3);
  std::vector<float> new_k = random_floats(kTokens * kKvHeads * kDim, 4);
  std::vector<float> new_v = random_floats(kTokens * kKvHeads * kDim, 5);
  std::vector<float> out = nans(kTokens * kHeads * kDim), lse = nans(kTokens * kHeads);
  std::vector<float> seg_output = nans(kTokens * kHeads * kSegments * kPadded);
  std::vector<float> seg_max = nans(kTokens * kHeads * kSegments), seg_expsum = seg_max;
  std::vector<std::int32_t> table{7, 2, -1, -1, 0, 5, 3, -1};
  std::vector<std::int32_t> query_start{0, 1, 4}, kv_len{20, 33};
  std::vector<std::int64_t> slots{7 * 16 + 19 - 16, 3, 40, -1};
  std::vector<float> one{1.0f}, sinks = random_floats(kHeads, 6);
  std::vector<float> qq = std::vector<float>(9, 0.0f);
  Buffer workspace;

  Tensor rows(std::vector<float>& data, std::int64_t heads) {
    return Tensor(data.data(), fp32, {kTokens, heads, kDim});
  }
  Tensor pages(std::vector<float>& data) {
    return Tensor(data.data(), fp32, {kPages, kPage, kKvHeads, kDim});
  }
  Segments segments() {
    return {Tensor(seg_output.data(), fp32, {kTokens, kHeads, kSegments, kPadded}),
            Tensor(seg_max.data(), fp32, {kTokens, kHeads, kSegments}),
            Tensor(seg_expsum.data(), fp32, {kTokens, kHeads, kSegments})};
  }

  template <class Args>
  Args common() {
    Args a;
    a.q = rows(q, kHeads);
    a.k_cache = pages(k_cache);
    a.v_cache = pages(v_cache);
    a.block_table = {table.data(), kColumns};
    a.batch = kBatch;
    a.query_start = query_start.data();
    a.kv_len = kv_len.data();
    a.out = rows(out, kHeads);
    a.lse = Lse::tokens_heads(Tensor(lse.data(), fp32, {kTokens, kHeads}));
    return a;
  }
  template <class Args>
  Args with_workspace(Args a) {
    workspace = Buffer(Device::host, kernels.workspace_bytes(a));
    std::memset(workspace.data(), 0xff, workspace.bytes());
    a.workspace = {workspace.data(), workspace.bytes()};
    return a;
  }
  SegmentedAttention segmented() { return with_workspace(common<SegmentedAttention>()); }
  SegmentedAttention handed_out() {
    auto a = common<SegmentedAttention>();
    a.segments = segments();
    return with_workspace(a);
  }
  ContextAttention context() {
    auto a = common<ContextAttention>();
    a.k = rows(new_k, kKvHeads);
    a.v = rows(new_v, kKvHeads);
    return with_workspace(a);
  }
  AppendKv append() {
    return {.k = rows(new_k, kKvHeads),
            .v = rows(new_v, kKvHeads),
            .k_cache = pages(k_cache),
            .v_cache = pages(v_cache),
            .slots = slots.data()};
  }
  ReduceSegments reduce() {
    return {.segments = segments(),
            .out = rows(out, kHeads),
            .lse = Lse::tokens_heads(Tensor(lse.data(), fp32, {kTokens, kHeads})),
            .batch = kBatch,
            .query_start = query_start.data(),
            .kv_len = kv_len.data()};
  }
};

bool untouched(const std::vector<float>& values) {
  for (float value : values)
    if (!std::isnan(value)) return false;
  return true;
}

/// `call` throws an E whose text has `text` in it, and the results of `p` are as before.
template <class E>
void expect_refused(const Problem& p, const std::function<void()>& call, const std::string& text) {
  SCOPED_TRACE(text);
  try {
    call();
    ADD_FAILURE() << "not refused";
  } catch (const E& error) {
    EXPECT_THAT(error.what(), HasSubstr(text));
  } catch (const Error& error) {
    ADD_FAILURE() << "another kind of error: " << error.what();
  }
  EXPECT_TRUE(untouched(p.out) && untouched(p.lse) && untouched(p.seg_output));
}

/// Changes to a call that fits, each with what the refusal must say.
template <class Args>
struct Change {
  const char* text;
  std::function<void(Args&, Problem&)> apply;
};

using Make = SegmentedAttention (Problem::*)();

template <class E, class Args, class Fit, class Call>
void refuse_all(const std::vector<Change<Args>>& changes, Fit fit, Call call) {
  for (const Change<Args>& change : changes) {
    Problem p;
    Args a = fit(p);
    change.apply(a, p);
    expect_refused<E>(
        p, [&] { call(p.kernels, a); }, change.text);
  }
}

/// What every attention over a paged cache refuses.
template <class Args>
std::vector<Change<Args>> paged_refusals() {
  return {
      {"q is [4, 4]; [tokens, heads, dim] is wanted", [](Args& a, Problem&) { a.q.dims = 2; }},
      {"q has stride 2 in its last dimension", [](Args& a, Problem&) { a.q.stride[2] = 2; }},
      {"q is on the cuda", [](Args& a, Problem&) { a.q.device = Device::cuda; }},
      {"q [4, 4, 32] has no data", [](Args& a, Problem&) { a.q.data = nullptr; }},
      {"heads 3 must be a multiple of kv_heads 2", [](Args& a, Problem&) { a.q.shape[1] = 3; }},
      {"q is e4m3 and there is no q_scale",
       [](Args& a, Problem&) { a.q.dtype = e4m3, a.dtype = fp32; }},
      {"dtype is e5m2; fp32, fp16 or bf16",
       [](Args& a, Problem&) { a.q.dtype = e4m3, a.dtype = e5m2; }},
      {"k_cache is [9, 16, 2]; pages are", [](Args& a, Problem&) { a.k_cache.dims = 3; }},
      {"k_cache is bf16; fp32, or fp8", [](Args& a, Problem&) { a.k_cache.dtype = bf16; }},
      {"k_cache is e5m2 and there is no k_scale",
       [](Args& a, Problem&) { a.k_cache.dtype = a.v_cache.dtype = e5m2; }},
      {"v_cache is e4m3 and there is no v_scale",
       [](Args& a, Problem& p) {
         a.k_cache.dtype = a.v_cache.dtype = e4m3;
         a.k_scale = {p.one.data()};
       }},
      {"v_cache is e4m3; fp32 is wanted", [](Args& a, Problem&) { a.v_cache.dtype = e4m3; }},
      {"they must have one shape", [](Args& a, Problem&) { a.v_cache.shape[0] = 8; }},
      {"in x-packed pages",
       [](Args& a, Problem& p) {
         a.k_cache = Tensor(p.k_cache.data(), fp32, {kPages, kKvHeads, 5, kPage, 8});
       }},
      {"beside x-packed keys",
       [](Args& a, Problem& p) {
         a.k_cache = Tensor(p.k_cache.data(), fp32, {kPages, kKvHeads, kDim / 8, kPage, 8});
       }},
      {"block_table is missing", [](Args& a, Problem&) { a.block_table = {}; }},
      {"block_table[1][2] is 9, which is no page", [](Args&, Problem& p) { p.table[6] = kPages; }},
      {"block_table[0][0] is -1, which is no page", [](Args&, Problem& p) { p.table[0] = -1; }},
      {"there is room for 64 in its row of block_table",
       [](Args&, Problem& p) { p.kv_len[1] = 80; }},
      {"kv_len[0] is -1", [](Args&, Problem& p) { p.kv_len[0] = -1; }},
      {"kv_len is missing", [](Args& a, Problem&) { a.kv_len = nullptr; }},
      {"needs query_start", [](Args& a, Problem&) { a.query_start = nullptr; }},
      {"query_start[0] is 1", [](Args&, Problem& p) { p.query_start[0] = 1; }},
      {"query_start descends", [](Args&, Problem& p) { p.query_start[1] = 5; }},
      {"query_start ends at row 5", [](Args&, Problem& p) { p.query_start[2] = 5; }},
      {"the batch has 0 sequences", [](Args& a, Problem&) { a.batch = 0; }},
      {"at most 30 were promised", [](Args& a, Problem&) { a.max_kv_len = 30; }},
      {"window -1 is negative", [](Args& a, Problem&) { a.mask.window = -1; }},
      {"right -2 is below -1", [](Args& a, Problem&) { a.mask.right = -2; }},
      {"softcap -1 is negative", [](Args& a, Problem&) { a.softcap = -1; }},
      {"tf32 is a way to make fp32 products",
       [](Args& a, Problem&) {
         a.tf32 = true;
         a.q.dtype = bf16;
         a.k_cache.dtype = a.v_cache.dtype = bf16;
       }},
      {"qq_bias has width 0",
       [](Args& a, Problem& p) {
         a.qq_bias = {p.qq.data(), 0, 3};
       }},
      {"a row stride of 0",
       [](Args& a, Problem& p) {
         a.qq_bias = {p.qq.data(), 3, 0};
       }},
      {"sequence 1 has 3 query rows; qq_bias is wide enough for 2",
       [](Args& a, Problem& p) {
         a.qq_bias = {p.qq.data(), 2, 3};
       }},
      {"out is [4, 4, 31]", [](Args& a, Problem&) { a.out.shape[2] = 31; }},
      {"out is bf16; fp32, or fp8", [](Args& a, Problem&) { a.out.dtype = bf16; }},
      {"out is e4m3 and there is no out_scale", [](Args& a, Problem&) { a.out.dtype = e4m3; }},
      {"lse is [4, 3]", [](Args& a, Problem&) { a.lse.tensor.shape[1] = 3; }},
      {"lse is fp16", [](Args& a, Problem&) { a.lse.tensor.dtype = fp16; }},
      {"workspace has 0 bytes", [](Args& a, Problem&) { a.workspace = {}; }},
      {"this call needs", [](Args& a, Problem&) { a.workspace.bytes -= 1; }},
      {"aligned to 256 bytes",
       [](Args& a, Problem&) {
         a.workspace.data = static_cast<std::byte*>(a.workspace.data) + 64;
       }},
  };
}

template <class Args>
std::vector<Change<Args>> operator+(std::vector<Change<Args>> a, std::vector<Change<Args>> b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

TEST(KernelsApi, SegmentedAttentionRefusesByName) {
  using A = SegmentedAttention;
  const auto call = [](const Kernels& k, const A& a) { k.segmented_attention(a); };
  refuse_all<InputError, A>(
      paged_refusals<A>() +
          std::vector<Change<A>>{{"out is missing", [](A& a, Problem&) { a.out = {}; }}},
      [](Problem& p) { return p.segmented(); }, call);
  refuse_all<Unsupported, A>(
      {{"head dim 12", [](A& a, Problem&) { a.q.shape[2] = 12; }}},
      [](Problem& p) { return p.segmented(); }, call);
  refuse_all<InputError, A>(
      {
          {"segments.output is [4, 4, 3, 31]; [4, 4, segments, at least 32]",
           [](A& a, Problem&) { a.segments.output.shape[3] = 31; }},
          {"its rows lie one behind the other",
           [](A& a, Problem&) { a.segments.output.stride[1] += 8; }},
          {"segments.max is [4, 4, 2]; [4, 4, 3]",
           [](A& a, Problem&) { a.segments.max.shape[2] = 2; }},
          {"segments.expsum [] has no data", [](A& a, Problem&) { a.segments.expsum = {}; }},
          {"segments.max is fp16", [](A& a, Problem&) { a.segments.max.dtype = fp16; }},
          {"a tile has 0 keys", [](A& a, Problem&) { a.segments.tile = 0; }},
          {"segments have -1 keys", [](A& a, Problem&) { a.segments.keys = -1; }},
          {"lse and out_scale go with out", [](A& a, Problem&) { a.out = {}; }},
      },
      [](Problem& p) { return p.handed_out(); }, call);
}

TEST(KernelsApi, ContextAttentionRefusesByName) {
  using A = ContextAttention;
  const auto fit = [](Problem& p) { return p.context(); };
  const auto call = [](const Kernels& k, const A& a) { k.context_attention(a); };
  std::vector<Change<A>> changes = paged_refusals<A>();
  std::erase_if(changes, [](const Change<A>& change) {  // the new tokens need no room in the cache
    return std::string(change.text).find("[1][2]") != std::string::npos;
  });
  refuse_all<InputError, A>(
      changes +
          std::vector<Change<A>>{
              {"out is missing", [](A& a, Problem&) { a.out = {}, a.lse = {}; }},
              {"k is [4, 4, 32]; [4, 2, 32]", [](A& a, Problem& p) { a.k = p.rows(p.q, kHeads); }},
              {"v is bf16; fp32 is wanted", [](A& a, Problem&) { a.v.dtype = bf16; }},
              {"give one of them",
               [](A& a, Problem& p) { a.out_scale = a.out_scale_inv = p.one.data(); }},
              {"block_table[1][1] is 77", [](A&, Problem& p) { p.table[5] = 77; }},
              {"has 3 new tokens and kv_len 2, which must count them",
               [](A&, Problem& p) { p.kv_len[1] = 2; }},
          },
      fit, call);
}

TEST(KernelsApi, ReduceSegmentsRefusesByName) {
  using A = ReduceSegments;
  refuse_all<InputError, A>(
      {
          {"out is e5m2 and there is no out_scale", [](A& a, Problem&) { a.out.dtype = e5m2; }},
          {"kv_len is missing", [](A& a, Problem&) { a.kv_len = nullptr; }},
          {"needs query_start", [](A& a, Problem&) { a.query_start = nullptr; }},
          {"segments.output is [4, 4, 3, 40]; [4, 4, segments, at least 48]",
           [](A& a, Problem&) { a.out.shape[2] = 48; }},
          {"segments.max [4, 4, 3] has strides",
           [](A& a, Problem&) { a.segments.max.stride[1] = 4; }},
          {"kv_len[1] is -5", [](A&, Problem& p) { p.kv_len[1] = -5; }},
          {"lse is [5, 4]", [](A& a, Problem&) { a.lse.tensor.shape[0] = 5; }},
      },
      [](Problem& p) { return p.reduce(); },
      [](const Kernels& k, const A& a) { k.reduce_segments(a); });
}

TEST(KernelsApi, AppendRefusesByNameAndWritesNothing) {
  using A = AppendKv;
  Problem before;
  const std::vector<Change<A>> changes{
      {"slots[2] is 144, past the end", [](A&, Problem& p) { p.slots[2] = kPages * kPage; }},
      {"token 2 goes to slot 3, which another token has too",
       [](A&, Problem& p) { p.slots[2] = 3; }},
      {"slots is missing", [](A& a, Problem&) { a.slots = nullptr; }},
      {"k is [4, 2]; [tokens, kv_heads, dim]", [](A& a, Problem&) { a.k.dims = 2; }},
      {"v is [3, 2, 32]; [4, 2, 32]", [](A& a, Problem&) { a.v.shape[0] = 3; }},
      {"k is e4m3; fp32, fp16 or bf16", [](A& a, Problem&) { a.k.dtype = e4m3; }},
      {"k_cache is bf16; fp32, or fp8", [](A& a, Problem&) { a.k_cache.dtype = bf16; }},
      {"k_cache is e4m3 and there is no k_scale",
       [](A& a, Problem&) { a.k_cache.dtype = a.v_cache.dtype = e4m3; }},
      {"pages are", [](A& a, Problem&) { a.k_cache.shape[3] = 16; }},
  };
  for (const Change<A>& change : changes) {
    Problem p;
    A a = p.append();
    change.apply(a, p);
    expect_refused<InputError>(
        p, [&] { p.kernels.append_kv(a); }, change.text);
    EXPECT_EQ(p.k_cache, before.k_cache);
    EXPECT_EQ(p.v_cache, before.v_cache);
  }
}

TEST(KernelsApi, ChecksOnDemand) {
  Problem p;
  p.kernels.check(p.segmented());
  p.kernels.check(p.context());
  p.kernels.check(p.append());
  p.table[6] = -7;  // the last key of sequence 1, a new one
  expect_refused<InputError>(
      p, [&] { p.kernels.check(p.segmented()); }, "block_table[1][2] is -7");
  p.kernels.check(p.context());
  p.slots[0] = 1000;
  expect_refused<InputError>(
      p, [&] { p.kernels.check(p.append()); }, "slots[0] is 1000");
}

TEST(KernelsApi, MergeRefusesByName) {
  using A = MergeAttnStates;
  std::vector<float> a_lse(kTokens * kHeads), b_lse = a_lse;
  const auto lse = [](std::vector<float>& data) {
    return Lse::heads_tokens(Tensor(data.data(), fp32, {kHeads, kTokens}));
  };
  const auto fit = [&](Problem& p) {
    return A{.out = p.rows(p.out, kHeads),
             .out_lse = lse(p.lse),
             .prefix_out = p.rows(p.q, kHeads),
             .prefix_lse = lse(a_lse),
             .suffix_out = p.rows(p.k_cache, kHeads),
             .suffix_lse = lse(b_lse)};
  };
  refuse_all<InputError, A>(
      {
          {"prefix_out is [4, 4]", [](A& a, Problem&) { a.prefix_out.dims = 2; }},
          {"prefix_out is e4m3; fp32, fp16 or bf16",
           [](A& a, Problem&) { a.prefix_out.dtype = e4m3; }},
          {"suffix_out is bf16; fp32 is wanted", [](A& a, Problem&) { a.suffix_out.dtype = bf16; }},
          {"suffix_out is [3, 4, 32]", [](A& a, Problem&) { a.suffix_out.shape[0] = 3; }},
          {"out is [4, 4, 16]", [](A& a, Problem&) { a.out.shape[2] = 16; }},
          {"out is bf16; fp32, or fp8", [](A& a, Problem&) { a.out.dtype = bf16; }},
          {"out is e4m3 and there is no output_scale", [](A& a, Problem&) { a.out.dtype = e4m3; }},
          {"out has stride 2", [](A& a, Problem&) { a.out.stride[2] = 2; }},
          {"prefix_lse is fp16", [](A& a, Problem&) { a.prefix_lse.tensor.dtype = fp16; }},
          {"suffix_lse [] has no data", [](A& a, Problem&) { a.suffix_lse = {}; }},
          {"out_lse is [4, 3]", [](A& a, Problem&) { a.out_lse.tensor.shape[1] = 3; }},
          {"prefill_tokens_with_context is -1",
           [](A& a, Problem&) { a.prefill_tokens_with_context = -1; }},
          {"out overlaps suffix_out: it must lie apart",
           [](A& a, Problem&) { a.out = a.suffix_out; }},
          {"out overlaps prefix_out: it may be the same tensor",
           [](A& a, Problem& p) { a.out = a.prefix_out, a.prefix_out.data = p.q.data() + 1; }},
          {"out overlaps prefix_out: it may be the same tensor",
           [](A& a, Problem& p) {
             a.out = a.prefix_out, a.out.dtype = e4m3, a.output_scale = p.one.data();
           }},
          {"out_lse overlaps suffix_lse", [](A& a, Problem&) { a.out_lse = a.suffix_lse; }},
      },
      fit, [](const Kernels& k, const A& a) { k.merge_attn_states(a, LogBase::e); });
}

TEST(KernelsApi, MergeStatesRefusesByName) {
  using A = MergeStates;
  std::vector<float> parts_lse(3 * kTokens * kHeads);
  refuse_all<InputError, A>(
      {
          {"parts is [3, 4, 4]; [parts, tokens, heads, dim]",
           [](A& a, Problem&) { a.parts.dims = 3; }},
          {"of at least one part", [](A& a, Problem&) { a.parts.shape[0] = 0; }},
          {"lses is [2, 4, 4]", [](A& a, Problem&) { a.lses.tensor.shape[0] = 2; }},
          {"out is [5, 4, 32]", [](A& a, Problem&) { a.out.shape[0] = 5; }},
          {"out is e5m2 and there is no output_scale", [](A& a, Problem&) { a.out.dtype = e5m2; }},
          {"out overlaps parts", [](A& a, Problem& p) { a.out = p.rows(p.k_cache, kHeads); }},
      },
      [&](Problem& p) {
        return A{.out = p.rows(p.out, kHeads),
                 .parts = Tensor(p.k_cache.data(), fp32, {3, kTokens, kHeads, kDim}),
                 .lses = Lse::tokens_heads(Tensor(parts_lse.data(), fp32, {3, kTokens, kHeads}))};
      },
      [](const Kernels& k, const A& a) { k.merge_states(a, LogBase::two); });
}

void expect_close(const std::vector<float>& a, const std::vector<float>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], 2e-6) << i;
}

TEST(KernelsApi, SegmentsReduceToTheResult) {
  Problem p;
  SegmentedAttention a = p.handed_out();
  a.sinks = p.sinks.data();
  p.kernels.segmented_attention(a);
  const std::vector<float> out = p.out, lse = p.lse;
  EXPECT_FALSE(std::isnan(out[0]));

  SegmentedAttention plain = p.segmented();
  plain.sinks = p.sinks.data();
  p.kernels.segmented_attention(plain);
  expect_close(out, p.out);
  expect_close(lse, p.lse);

  p.out = nans(p.out.size()), p.lse = nans(p.lse.size());
  p.kernels.reduce_segments(p.reduce());  // no sink: segment 0 holds it
  expect_close(out, p.out);
  expect_close(lse, p.lse);
}

TEST(KernelsApi, AppendedContextIsTheWholeCache) {
  Problem p;
  p.slots = {2 * 16 + 3, 5 * 16 + 14, 5 * 16 + 15, 3 * 16};  // positions 19; 30, 31, 32
  p.kernels.context_attention(p.context());
  const std::vector<float> out = p.out, lse = p.lse;
  p.kernels.append_kv(p.append());
  p.kernels.segmented_attention(p.segmented());
  expect_close(out, p.out);
  expect_close(lse, p.lse);
}

TEST(KernelsApi, SkippedDecodeIsUntouched) {
  Problem p;
  ContextAttention a = p.context();
  a.skip_decode = true;
  p.kernels.context_attention(a);
  const auto first_row = p.out.begin() + kHeads * kDim;
  EXPECT_TRUE(untouched({p.out.begin(), first_row}));
  EXPECT_TRUE(untouched({p.lse.begin(), p.lse.begin() + kHeads}));
  const std::vector<float> rest(first_row, p.out.end());
  p.kernels.context_attention(p.context());
  EXPECT_EQ(rest, std::vector<float>(p.out.begin() + kHeads * kDim, p.out.end()));
}

TEST(KernelsApi, WorkspaceNeedsShapesOnly) {
  Problem p;
  ContextAttention a = p.context();
  const std::size_t bytes = p.kernels.workspace_bytes(a);
  a.q.data = a.k.data = a.v.data = a.k_cache.data = a.v_cache.data = a.out.data = nullptr;
  a.block_table.data = nullptr;
  a.query_start = a.kv_len = nullptr;
  EXPECT_EQ(p.kernels.workspace_bytes(a), bytes);
}

}  // namespace
}  // namespace longspan
