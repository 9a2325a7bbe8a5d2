// A rank's share of the query rows, on a GPU: masks and biases depend on a row's position in its
// sequence, for every layout of the rows against every layout of the keys, against float64.
#include "tests/gpu/fp8_products.hpp"
#include "tests/gpu/serving_ranks.hpp"
#include "tests/support/query_shards_refusals.hpp"

namespace longspan::tests {
namespace {

using test::Cut;

constexpr DType kTypes[] = {DType::bf16, DType::fp16, DType::fp32};
constexpr QueryCut kCuts[] = {{Layout::contiguous, 3},     {Layout::ranges, 3},
                              {Layout::zigzag, 2},         {Layout::striped, 3},
                              {Layout::interleaved, 2, 1}, {Layout::interleaved, 3, 16},
                              {Layout::interleaved, 2, 3}};

/// Shares past a tile's rows, short ones, single rows, and none.
Serving mixed(DType dtype) {
  return {.dtype = dtype,
          .q_lens = {reduced(450, 90), 5, 1, 0, 40},
          .kv_lens = {reduced(700, 200), 130, 333, 20, 41}};
}

TEST(QueryShards, EveryLayoutWithEveryFeature) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (const QueryCut& rows : kCuts)
      for (const Cut& keys : {Cut{Layout::contiguous}, Cut{Layout::zigzag}, Cut{Layout::striped},
                              Cut{Layout::interleaved, 16}})
        for (const Alibi alibi : {Alibi::context, Alibi::query}) {
          Serving s = mixed(dtype);
          s.page = alibi == Alibi::query ? 16 : 0;
          s.mask.window = alibi == Alibi::query ? 150 : 0;
          s.alibi = alibi;
          s.qq_bias = s.sinks = true;
          check_dealt(s, {.layout = keys.layout, .ranks = 2, .block = keys.block, .queries = rows});
        }
}

TEST(QueryShards, OneAtATime) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (const QueryCut& rows : kCuts)
      for (const bool invariant : {false, true}) {
        const Dealt dealt{
            .layout = Layout::zigzag, .ranks = 2, .invariant = invariant, .queries = rows};
        const Serving plain = mixed(dtype);
        check_dealt(plain, dealt);
        Serving s = plain;
        s.mask = {.window = 64, .right = 3};
        check_dealt(s, dealt);
        s = plain;
        s.causal = {1, 0, 0, 1, 0};
        check_dealt(s, dealt);
        s = plain;
        s.qq_bias = true;
        check_dealt(s, dealt);
        s = plain;
        s.softcap = 20;
        s.kv_dtype = DType::e4m3;
        check_dealt(s, dealt);
      }
}

/// Few rows, dealt out one or two to a rank: the kernel for short queries must not take the last
/// row of a share for the last of the sequence.
TEST(QueryShards, ShortQueries) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (const QueryCut& rows : kCuts)
      for (const int dim : {64, 128, 256})
        for (const bool biased : {false, true}) {
          Serving s{.dim = dim,
                    .dtype = dtype,
                    .q_lens = {4, 2, 12, 1},
                    .kv_lens = {reduced(900, 300), 2, 200, 129}};
          s.qq_bias = biased;
          if (biased) s.alibi = dim == 64 ? Alibi::query : Alibi::context;
          check_dealt(s, {.ranks = 2, .queries = rows});
        }
}

TEST(QueryShards, Documents) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (const QueryCut& rows : kCuts)
      for (const bool causal : {false, true}) {
        const int length = reduced(700, 250);
        Serving s{.heads = 4,
                  .kv_heads = 2,
                  .dim = 64,
                  .dtype = dtype,
                  .q_lens = {length},
                  .kv_lens = {length}};
        s.mask.causal = causal;
        s.documents = {length / 17, length / 2, length / 2 + 1, length - 80, length - 10};
        check_dealt(s, {.layout = Layout::zigzag, .ranks = 2, .queries = rows});
      }
}

/// Hopper's kernel for long queries supports shares too; with ALiBi only those whose rows follow
/// each other.
TEST(QueryShards, OnHopper) {
  LONGSPAN_NEEDS_HOPPER();
  for (const DType dtype : {DType::bf16, DType::fp16})
    for (const QueryCut& rows : kCuts)
      for (const int dim : {64, 128, 256})
        for (const std::optional<Alibi> alibi :
             {std::optional<Alibi>{}, std::optional{Alibi::context}, std::optional{Alibi::query}}) {
          Serving s{.heads = 4,
                    .kv_heads = 2,
                    .dim = dim,
                    .dtype = dtype,
                    .q_lens = {reduced(900, 400), 70},
                    .kv_lens = {reduced(1300, 500), 300}};
          s.alibi = alibi;
          s.page = 0;
          s.mask.window = alibi ? 0 : 333;
          const bool follow = rows.layout == Layout::contiguous || rows.layout == Layout::ranges;
          check_dealt(s, {.layout = Layout::zigzag,
                          .ranks = 2,
                          .on_hopper = !alibi || follow,
                          .queries = rows});
        }
}

/// A tensor core cuts sums of products of e4m3, so the inputs are chosen to lose nothing.
TEST(QueryShards, ProductsOfE4m3) {
  LONGSPAN_NEEDS_HOPPER();
  for (const QueryCut& rows : kCuts) {
    const Serving s{.dim = 128,
                    .dtype = DType::bf16,
                    .q_lens = {reduced(700, 300)},
                    .kv_lens = {reduced(1000, 400)}};
    const Dealt dealt{.ranks = 2, .on_hopper = true, .fp8_products = true, .queries = rows};
    const std::uint64_t seed = fresh_seed();
    SCOPED_TRACE(trace(s, dealt, seed));
    const ServingProblem problem = exact_problem(s, seed);
    expect_exact(problem, run_dealt(problem, dealt), 12);
  }
}

/// In the fixed order a row has the same bits in every share of more than a few rows.
TEST(QueryShards, FixedOrderKeepsTheBits) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes) {
    Serving s{.heads = 2,
              .kv_heads = 1,
              .dim = 64,
              .dtype = dtype,
              .q_lens = {reduced(400, 100)},
              .kv_lens = {reduced(1500, 200)}};
    s.alibi = Alibi::query;
    if (is_left_out(8 * work_of(s))) continue;
    const std::uint64_t seed = fresh_seed();
    const ServingProblem problem(s, seed);
    const ServingResult whole = run_dealt(problem, {.invariant = true});
    for (const QueryCut& rows : kCuts) {
      if (rows.layout == Layout::ranges) continue;  // one of its shares has few rows
      const Dealt dealt{.invariant = true, .queries = rows};
      SCOPED_TRACE(trace(s, dealt, seed));
      expect_same_bits(whole, run_dealt(problem, dealt));
    }
  }
}

TEST(QueryShards, WhatIsRefused) {
  LONGSPAN_NEEDS_GPU();
  expect_refusals_of_query_shards(*kernels::cuda_backend());
}

}  // namespace
}  // namespace longspan::tests
