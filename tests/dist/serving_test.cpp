// Serving features of one device, on every rank count: a sharded paged cache with each feature
// alone and with all of them together; prefill chunks, decode and drafts in one batch; a cache that
// grows. Against float64, with one tolerance for every number of ranks, and bit for bit against one
// process alone where the shards are even.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "tests/dist/world.hpp"
#include "tests/support/message.hpp"
#include "tests/support/serving_run.hpp"

namespace longspan::tests {
namespace {

void expect_right(const ServingProblem& problem, const ServingResult& result,
                  const std::vector<std::int64_t>& rows) {
  const Verdict verdict = judge(problem, result.out, result.lse, rows, problem.tolerance());
  EXPECT_EQ(verdict.wrong, 0) << verdict.first << " (worst " << verdict.worst << ", lse "
                              << verdict.worst_lse << ")";
}

std::string bytes_of(const ServingResult& result) {
  std::string text(reinterpret_cast<const char*>(result.out.data()), result.out.size());
  text.append(reinterpret_cast<const char*>(result.lse.data()), result.lse.size() * sizeof(float));
  return text;
}

/// Replicated queries: every rank has the same bits.
void expect_same_on_all_ranks(const Communicator& world, const ServingResult& result) {
  const std::string mine = bytes_of(result);
  for (const std::string& theirs : world.gather(mine, "comparison"))
    EXPECT_TRUE(theirs == mine) << "ranks got different bits";
}

/// Cuts of each sequence at random places, some of them empty: [batch, ranks + 1].
std::vector<std::int64_t> random_ranges(const ServingProblem& problem, int ranks,
                                        std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::int64_t> table;
  for (const std::int64_t length : problem.shape.kv_lens) {
    std::vector<std::int64_t> cuts{0, length};
    for (int r = 1; r < ranks; ++r)
      cuts.push_back(random() % 3 == 0 ? 0 : static_cast<std::int64_t>(random() % (length + 1)));
    std::sort(cuts.begin(), cuts.end());
    table.insert(table.end(), cuts.begin(), cuts.end());
  }
  return table;
}

struct Deal {
  Layout layout;
  std::int64_t block;
};
constexpr Deal kDeals[] = {{Layout::contiguous, kSegment},  {Layout::interleaved, 1},
                           {Layout::interleaved, 16},       {Layout::interleaved, 64},
                           {Layout::interleaved, kSegment}, {Layout::interleaved, 2 * kSegment},
                           {Layout::zigzag, kSegment},      {Layout::ranges, kSegment}};

/// One communicator and one seed for a test.
class OnRanks : public ::testing::Test {
 protected:
  void check(const Serving& shape, int only = -1);
  struct Growth {
    std::vector<std::int32_t> q_lens, kv_lens;
  };
  void grow(Serving shape, std::int64_t block, bool at_once = false,
            const std::vector<Growth>& steps = kGrowth);
  inline static const std::vector<Growth> kGrowth{{{37, 20, 129}, {37, 20, 129}},
                                                  {{64, 1, 100}, {101, 21, 229}},
                                                  {{1, 1, 1}, {102, 22, 230}},
                                                  {{1, 1, 2}, {103, 23, 232}},
                                                  {{4, 5, 1}, {107, 28, 233}}};

  const Communicator world = test_world();
  const std::uint64_t seed = shared_seed(world);
};

/// The layer with every layout of the keys (with `only` >= 0: with that one).
void OnRanks::check(const Serving& shape, int only) {
  const ServingProblem problem(shape, seed);
  for (int d = 0; d < static_cast<int>(std::size(kDeals)); ++d) {
    if (only >= 0 && d != only) continue;
    SCOPED_TRACE(describe(shape) + " | " + name(kDeals[d].layout) + " " +
                 std::to_string(kDeals[d].block) + " seed " + std::to_string(seed));
    Shard shard{kDeals[d].layout, world.rank(), world.size(), shape.kv_lens[0], kDeals[d].block};
    std::vector<std::int64_t> table;
    if (shard.layout == Layout::ranges) table = random_ranges(problem, world.size(), seed);
    shard.table = table.data();
    const ServingResult result = run_layer(world, problem, shard, table);
    expect_right(problem, result, problem.all_rows());
    expect_same_on_all_ranks(world, result);
    if (!shard.keeps_order()) continue;
    const Shard whole{shard.layout, 0, 1, shard.length, shard.block};
    const ServingResult single = run_layer(self(world.device()), problem, whole);
    EXPECT_TRUE(bytes_of(single) == bytes_of(result)) << "other bits than one rank gives";
  }
}

// Prefill chunks, a single-token decode, drafts, an idle sequence, and one without a context.
const std::vector<std::int32_t> kQ{1, 7, 33, 0, 20}, kKv{300, 170, 400, 50, 20};

TEST_F(OnRanks, Paged) { check({.q_lens = kQ, .kv_lens = kKv}); }
TEST_F(OnRanks, PagedIn16Bits) {
  check({.dtype = DType::bf16, .q_lens = kQ, .kv_lens = kKv});
  check({.dtype = DType::fp16, .q_lens = kQ, .kv_lens = kKv}, 4);
}
TEST_F(OnRanks, LongPrefillChunks) {
  check({.dtype = DType::bf16, .q_lens = {150, 1, 200}, .kv_lens = {700, 900, 200}});
}
TEST_F(OnRanks, OneSequence) {
  check({.q_lens = {1}, .kv_lens = {517}});
  check({.q_lens = {65}, .kv_lens = {300}}, 2);
}
TEST_F(OnRanks, PageSizes) {
  for (int page : {1, 8, 32, 64, 128, 256, 544}) {
    check({.q_lens = kQ, .kv_lens = kKv, .page = page}, 0);
    check({.q_lens = kQ, .kv_lens = kKv, .page = page}, 2);
  }
}
TEST_F(OnRanks, XPackedPages) {
  for (DType dtype : {DType::fp32, DType::bf16})
    check({.dtype = dtype, .q_lens = kQ, .kv_lens = kKv, .page = 32, .x_packed = true});
}
TEST_F(OnRanks, PagesFarApart) {
  check({.q_lens = kQ, .kv_lens = kKv, .page = 32, .padding = 48}, 0);
  check({.q_lens = kQ, .kv_lens = kKv, .page = 32, .x_packed = true, .padding = 48}, 3);
}
TEST_F(OnRanks, PagesInCommon) {
  check({.q_lens = {1, 4, 20}, .kv_lens = {400, 390, 280}, .page = 8, .shared = 256}, 1);
  check({.q_lens = {1, 4, 20}, .kv_lens = {400, 390, 280}, .page = 8, .shared = 256}, 2);
}
TEST_F(OnRanks, Window) {
  for (std::int64_t window : {1, 20, 150})
    check({.q_lens = kQ, .kv_lens = kKv, .mask = {.causal = true, .window = window}});
}
TEST_F(OnRanks, TwoSidedWindow) {
  check({.q_lens = kQ, .kv_lens = kKv, .mask = {.window = 40, .right = 3}});
}
TEST_F(OnRanks, CausalFlags) {
  check({.q_lens = kQ, .kv_lens = kKv, .mask = {.causal = false}, .causal = {0, 1, 0, 1, 1}});
  check({.q_lens = kQ,
         .kv_lens = kKv,
         .mask = {.causal = true, .window = 70},
         .causal = {1, 0, 0, 1, 0}});
}
TEST_F(OnRanks, Documents) {
  check({.q_lens = {60}, .kv_lens = {400}, .documents = {0, 90, 350, 351, 400}});
  check(
      {.q_lens = {400}, .kv_lens = {400}, .mask = {.causal = false}, .documents = {10, 150, 300}});
}
TEST_F(OnRanks, Softcap) { check({.q_lens = kQ, .kv_lens = kKv, .softcap = 2.0f}); }
TEST_F(OnRanks, AlibiByContext) { check({.q_lens = kQ, .kv_lens = kKv, .alibi = Alibi::context}); }
TEST_F(OnRanks, AlibiByQuery) {
  check({.q_lens = kQ,
         .kv_lens = kKv,
         .mask = {.causal = false},
         .alibi = Alibi::query,
         .small_dtype = DType::bf16});
}
TEST_F(OnRanks, QqBias) {
  check({.q_lens = kQ, .kv_lens = kKv, .qq_bias = true});
  // Only drafts: every rank but one has only hidden keys for some rows.
  check({.q_lens = {8, 16, 1}, .kv_lens = {8, 16, 1}, .qq_bias = true}, 1);
}
TEST_F(OnRanks, Sinks) {
  for (DType dtype : {DType::fp32, DType::bf16, DType::fp16})
    check({.q_lens = kQ, .kv_lens = kKv, .sinks = true, .small_dtype = dtype});
  check({.q_lens = {4}, .kv_lens = {0}, .sinks = true}, 0);
}
TEST_F(OnRanks, Fp8Keys) {
  for (DType kv : {DType::e4m3, DType::e5m2})
    for (DType dtype : {DType::bf16, DType::fp16, DType::fp32})
      for (bool per_head : {false, true}) {
        const Serving s{.dtype = dtype,
                        .kv_dtype = kv,
                        .q_lens = kQ,
                        .kv_lens = kKv,
                        .per_head_scales = per_head};
        check(s, 0);
        check(s, 2);
      }
  check({.dtype = DType::bf16,
         .kv_dtype = DType::e4m3,
         .q_lens = kQ,
         .kv_lens = kKv,
         .page = 32,
         .x_packed = true});
}
TEST_F(OnRanks, Fp8Queries) {
  for (DType q : {DType::e4m3, DType::e5m2})
    check({.dtype = DType::bf16,
           .q_dtype = q,
           .kv_dtype = DType::e4m3,
           .q_lens = kQ,
           .kv_lens = kKv,
           .per_head_scales = true},
          0);
}
TEST_F(OnRanks, Fp8Output) {
  check({.dtype = DType::bf16,
         .out_dtype = DType::e4m3,
         .q_lens = kQ,
         .kv_lens = kKv,
         .out_scale = 0.05f});
}
TEST_F(OnRanks, SkippedDecode) {
  check({.q_lens = {1, 7, 1, 30}, .kv_lens = {300, 170, 1, 60}, .skip_decode = true});
}
TEST_F(OnRanks, HeadsAndDims) {
  struct Heads {
    int heads, kv_heads, dim;
  };
  for (const Heads& h : {Heads{5, 1, 24}, Heads{7, 1, 80}, Heads{14, 2, 96}, Heads{4, 4, 112},
                         Heads{64, 1, 16}, Heads{3, 3, 192}, Heads{4, 2, 256}}) {
    check({.heads = h.heads, .kv_heads = h.kv_heads, .dim = h.dim, .q_lens = kQ, .kv_lens = kKv},
          2);
    check({.heads = h.heads,
           .kv_heads = h.kv_heads,
           .dim = h.dim,
           .dtype = DType::bf16,
           .q_lens = kQ,
           .kv_lens = kKv},
          0);
  }
}
// The peers' test of decode over ranks: sequences of 0 and 2 keys, and of the queries [0, 1), [1,
// 5); single tokens over shards of which some are empty; more heads than a warp has lanes.
TEST_F(OnRanks, ContextParallelDecode) {
  for (DType dtype : {DType::fp32, DType::fp16, DType::bf16}) {
    check({.heads = 8,
           .kv_heads = 1,
           .dim = 32,
           .dtype = dtype,
           .q_lens = {1, 4},
           .kv_lens = {0, 2}});
    check({.heads = 8,
           .kv_heads = 1,
           .dim = 32,
           .dtype = dtype,
           .q_lens = {1, 1, 1, 1, 1, 1, 1},
           .kv_lens = {1, 2, 3, 65, 200, 129, 1000}});
  }
  for (bool sinks : {false, true})
    check({.heads = 24,
           .kv_heads = 1,
           .dim = 256,
           .dtype = DType::bf16,
           .q_lens = {1, 3, 2, 1, 3, 2, 1},
           .kv_lens = {3, 0, 64, 255, 517, 3, 0},
           .sinks = sinks,
           .page = 64});
}
TEST_F(OnRanks, MoreRowsThanKeys) { check({.q_lens = {9, 1, 3}, .kv_lens = {2, 0, 3}, .page = 1}); }

/// All options of one batch at once.
Serving everything(DType dtype) {
  return {.heads = 14,
          .kv_heads = 2,
          .dim = 80,
          .dtype = dtype,
          .kv_dtype = DType::e4m3,
          .q_lens = kQ,
          .kv_lens = kKv,
          .mask = {.causal = true, .window = 140},
          .causal = {1, 1, 0, 1, 1},
          .softcap = 5.0f,
          .alibi = Alibi::context,
          .qq_bias = true,
          .sinks = true,
          .small_dtype = DType::bf16,
          .per_head_scales = true};
}
TEST_F(OnRanks, AllTogether) {
  check(everything(DType::fp32));
  Serving s = everything(DType::bf16);
  s.q_dtype = DType::e5m2;
  s.out_dtype = DType::e4m3;
  s.out_scale = 0.1f;
  check(s);
  s = everything(DType::fp16);
  s.alibi = Alibi::query;
  s.x_packed = true;
  s.page = 32;
  check(s);
  s = everything(DType::bf16);
  s.page = 0;  // the same without pages
  check(s);
}

TEST_F(OnRanks, ShardedQueries) {
  Serving plain{.q_lens = kQ, .kv_lens = kKv};
  plain.sinks = true;
  for (const Serving& shape : {plain, everything(DType::fp32), everything(DType::bf16)}) {
    const ServingProblem problem(shape, seed);
    for (Layout layout : {Layout::contiguous, Layout::striped, Layout::interleaved}) {
      SCOPED_TRACE(describe(shape) + " | " + name(layout) + " seed " + std::to_string(seed));
      const Shard keys{Layout::interleaved, world.rank(), world.size(), shape.kv_lens[0], 16};
      const Shard queries{layout, world.rank(), world.size(), problem.tokens, 16};
      std::vector<std::int64_t> rows;
      const ServingResult result = run_layer(world, problem, keys, {}, queries, &rows);
      expect_right(problem, result, rows);
    }
  }
}

/// A cache from nothing: chunks of prefill, decode, drafts, each appended and attended. `at_once`:
/// in one call, short steps by a layer for such steps.
void OnRanks::grow(Serving shape, std::int64_t block, bool at_once,
                   const std::vector<Growth>& steps) {
  SCOPED_TRACE(describe(shape) + " | interleaved by " + std::to_string(block) + " seed " +
               std::to_string(seed));
  shape.whole_table = true;
  shape.q_lens = steps.back().q_lens;
  shape.kv_lens = steps.back().kv_lens;
  const ServingProblem last(shape, seed);
  const Shard shard{Layout::interleaved, world.rank(), world.size(), shape.kv_lens[0], block};
  const std::vector<std::int64_t> none(shape.batch(), 0);
  const ServingArrays cache(world.device(), last, shard, {}, std::nullopt, &none);

  Options options = options_for(last);
  options.limits.max_tokens = options.limits.max_query_len = 500;
  options.invariant = world.device() == Device::cuda;
  options.keys = rule_of(shard);
  Attention layer(world, options);
  options.limits.max_query_len = 16;
  Attention short_layer(world, options);
  for (const Growth& step : steps) {
    const ServingProblem now = last.step(step.q_lens, step.kv_lens);
    const ServingArrays arrays(world.device(), now, shard);
    const Buffer new_k = on_device(world.device(), now.new_rows(false)),
                 new_v = on_device(world.device(), now.new_rows(true));
    AttentionArgs args = arrays.args();
    args.k = cache.k_tensor();
    args.v = cache.v_tensor();
    args.block_table = cache.block_table();
    args.k_scale = cache.scales(last.k_scale, cache.k_scale);
    args.v_scale = shape.values_in_keys ? args.k_scale : cache.scales(last.v_scale, cache.v_scale);
    Append append;
    append.new_k =
        Tensor(new_k.data(), shape.dtype, {now.tokens, shape.kv_heads, shape.dim}, world.device());
    if (!shape.values_in_keys)
      append.new_v = Tensor(new_v.data(), shape.dtype,
                            {now.tokens, shape.kv_heads, shape.of_value()}, world.device());
    append.k = args.k;
    append.v = args.v;
    append.block_table = args.block_table;
    append.total_keys = args.total_keys;
    append.query_start = args.query_start;
    append.kv_len = args.kv_len;
    append.k_scale = args.k_scale;
    append.v_scale = args.v_scale;
    if (at_once) {
      args.new_k = append.new_k;
      args.new_v = append.new_v;
    } else {
      layer.append(append);
    }
    const bool is_short = *std::max_element(step.q_lens.begin(), step.q_lens.end()) <= 16;
    Attention& runs = at_once && is_short ? short_layer : layer;
    runs.run(args);
    runs.wait();
    const ServingResult result = arrays.result();
    expect_right(now, result, now.all_rows());
    expect_same_on_all_ranks(world, result);
  }
  // The written keys are those that the problem would store, and nothing else was changed.
  const Cache expected = last.cache(shard);
  EXPECT_TRUE(on_host(cache.k, expected.k.size()) == expected.k) << "keys in the cache differ";
  EXPECT_TRUE(on_host(cache.v, expected.v.size()) == expected.v) << "values in the cache differ";
}

TEST_F(OnRanks, GrowingCache) {
  for (std::int64_t block : {1, 16, 128}) grow({}, block);
  grow({.dtype = DType::bf16, .page = 64}, 16);
  grow({.dim = 48, .value_dim = 24, .dtype = DType::fp16}, 16);
}

/// A cache of latent keys: new values come with the new keys.
TEST_F(OnRanks, GrowingCacheOfValuesInKeys) {
  grow({.heads = 4, .kv_heads = 1, .dim = 72, .value_dim = 64, .values_in_keys = true}, 16);
  grow({.heads = 4,
        .kv_heads = 1,
        .dim = 72,
        .value_dim = 64,
        .values_in_keys = true,
        .kv_dtype = DType::e4m3},
       1, true);
}

/// Run and append in one: written by separate kernels, and by attention itself.
TEST_F(OnRanks, GrowingCacheInOneCall) {
  const std::vector<Growth> alone{{{129}, {129}}, {{100}, {229}}, {{1}, {230}},   {{2}, {232}},
                                  {{9}, {241}},   {{15}, {256}},  {{1}, {257}},   {{1}, {258}},
                                  {{16}, {274}},  {{5}, {279}},   {{500}, {779}}, {{3}, {782}}};
  // CPUs append first, whatever the dim.
  const bool cuda = world.device() == Device::cuda;
  const std::vector<int> dims = cuda ? std::vector{64, 80, 128, 256} : std::vector{64};
  for (const DType dtype : {DType::fp32, DType::fp16, DType::bf16})
    for (std::int64_t block : {1, 16, 128, 256})
      for (const int dim : dims) grow({.dim = dim, .dtype = dtype, .page = 0}, block, true, alone);
  grow({.heads = 16, .kv_heads = 1, .dim = 128, .dtype = DType::bf16, .page = 0}, 128, true, alone);
  grow({.dtype = DType::bf16, .page = 0}, 128, false, alone);
  grow({.dtype = DType::bf16, .page = 64}, 16, true);
  grow({.dtype = DType::bf16, .kv_dtype = DType::e4m3}, 1, true);
}
TEST_F(OnRanks, GrowingCacheInXPackedPages) {
  grow({.dtype = DType::bf16, .page = 16, .x_packed = true}, 16);
}
TEST_F(OnRanks, GrowingCacheInFp8) {
  grow({.dtype = DType::bf16, .kv_dtype = DType::e4m3}, 1);
  grow({.dtype = DType::fp32,
        .kv_dtype = DType::e5m2,
        .per_head_scales = true,
        .page = 32,
        .x_packed = true},
       16);
}
TEST_F(OnRanks, GrowingCacheWithEverything) {
  for (std::int64_t block : {1, 16, 128}) {
    Serving s = everything(DType::bf16);
    s.causal = {1, 1, 1};
    grow(s, block);
  }
}

}  // namespace
}  // namespace longspan::tests
