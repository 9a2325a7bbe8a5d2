// Long queries, alone and beside short ones, with all serving features: each feature alone and all
// together, on simulated ranks, against float64. decode_features_test does the same for short
// queries alone. Caches hold NaN, and tables -1 or garbage, in all places that no row may see.
#include "tests/gpu/serving_ranks.hpp"

namespace longspan::tests {
namespace {

using test::Cut;

constexpr DType kTypes[] = {DType::bf16, DType::fp16, DType::fp32};

/// The possible types of a cache for products of a dtype.
std::vector<DType> stored(DType dtype) { return {dtype, DType::e4m3, DType::e5m2}; }

/// Rows past a tile's 128, a short sequence, one of a single query, and an empty one.
Serving mixed(DType dtype, DType kv) {
  return {.dtype = dtype,
          .kv_dtype = kv,
          .q_lens = {reduced(150, 50), 5, 1, 0, 40},
          .kv_lens = {reduced(700, 300), 130, 333, 20, 41}};
}

TEST(Features, PageSizesAndLayouts) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (const DType kv : stored(dtype))
      for (const int page : {1, 8, 16, 32, 64, 128, 256, 544})
        for (const bool x_packed : {false, true}) {
          Serving s = mixed(dtype, kv);
          s.page = page;
          s.x_packed = x_packed;
          s.padding = page == 32 ? 24 : 0;
          s.per_head_scales = page >= 64;
          check_dealt(s, {.invariant = page % 3 == 1});
        }
}

/// Pages at distances that are not a multiple of a vector, queries at odd addresses, page sizes
/// that vectors do not divide: element by element.
TEST(Features, OddStrides) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (const DType kv : stored(dtype))
      for (const bool x_packed : {false, true}) {
        Serving s = mixed(dtype, kv);
        s.x_packed = x_packed;
        s.padding = 3;
        check_dealt(s, {.odd_queries = true});
        s.q_dtype = DType::e4m3;
        s.padding = 0;
        s.page = 12;
        check_dealt(s, {.odd_queries = true});
      }
}

TEST(Features, HeadDims) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (const DType kv : stored(dtype))
      for (const int dim : {16, 24, 32, 64, 80, 96, 112, 128, 136, 192, 256})
        for (const bool invariant : {false, true}) {
          Serving s{.heads = 4,
                    .kv_heads = 2,
                    .dim = dim,
                    .dtype = dtype,
                    .kv_dtype = kv,
                    .q_lens = {100},
                    .kv_lens = {333}};
          s.x_packed = invariant;
          check_dealt(s, {.invariant = invariant});
        }
}

TEST(Features, Groups) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (const DType kv : {dtype, DType::e4m3})
      for (const int group : {1, 4, 5, 7, 64}) {
        Serving s = mixed(dtype, kv);
        s.heads = 2 * group;
        s.per_head_scales = s.sinks = true;
        s.alibi = Alibi::query;
        check_dealt(s);
      }
}

/// Positions of a shard's keys decide the window, the causal bound, ALiBi and qq_bias.
TEST(Features, Shards) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : {DType::bf16, DType::fp32})
    for (const Cut& cut :
         {Cut{Layout::contiguous}, Cut{Layout::ranges}, Cut{Layout::zigzag}, Cut{Layout::striped},
          Cut{Layout::interleaved, 1}, Cut{Layout::interleaved, 16}, Cut{Layout::interleaved, 128}})
      for (const int ranks : {1, 2, 4})
        for (const Alibi alibi : {Alibi::context, Alibi::query})
          for (const int page : {0, 16}) {
            Serving s = mixed(dtype, dtype);
            s.page = page;
            s.mask.window = 400;
            s.alibi = alibi;
            s.qq_bias = s.sinks = true;
            check_dealt(s, {cut.layout, ranks, cut.block, ranks == 4});
          }
}

TEST(Features, OneAtATime) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (const bool invariant : {false, true}) {
      const Dealt dealt{.ranks = 2, .invariant = invariant};
      const Serving plain = mixed(dtype, dtype);
      check_dealt(plain, dealt);
      for (const DType q : {DType::e4m3, DType::e5m2})
        for (const bool per_head : {false, true}) {
          Serving s = plain;
          s.q_dtype = q;
          s.per_head_scales = per_head;
          check_dealt(s, dealt);
        }
      for (const Mask& mask :
           {Mask{.causal = true, .window = 1}, Mask{.causal = true, .window = 100},
            Mask{.window = 64, .right = 3}, Mask{}}) {
        Serving s = plain;
        s.mask = mask;
        check_dealt(s, dealt);
      }
      Serving s = plain;
      s.causal = {1, 0, 1, 0, 0};
      check_dealt(s, dealt);
      for (const float softcap : {0.001f, 20.0f}) {  // the first: scores / cap far beyond 88
        s = plain;
        s.softcap = softcap;
        check_dealt(s, dealt);
      }
      for (const DType small : {DType::fp32, DType::bf16, DType::fp16}) {
        s = plain;
        s.small_dtype = small;
        s.qq_bias = true;
        check_dealt(s, dealt);
        s.qq_bias = false;
        s.alibi = small == DType::bf16 ? Alibi::context : Alibi::query;
        check_dealt(s, dealt);
      }
      s = plain;
      s.skip_decode = true;
      check_dealt(s, dealt);
    }
}

TEST(Features, Documents) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (const int ranks : {1, 2})
      for (const int q_len : {150, 700})
        for (const bool causal : {false, true})
          for (const std::vector<std::int64_t>& documents :
               {std::vector<std::int64_t>{0, 300, 301, 620, 700},
                std::vector<std::int64_t>{40, 300, 600, 690}}) {
            Serving s{.dtype = dtype, .q_lens = {q_len}, .kv_lens = {700}};
            s.mask.causal = causal;
            s.documents = documents;
            s.page = ranks == 1 ? 0 : 16;
            check_dealt(s, {.ranks = ranks, .invariant = q_len == 700});
          }
}

/// Chunks, ranges of images and prefixes, of one sequence and of a batch.
TEST(Features, ChunksRangesAndPrefixes) {
  LONGSPAN_NEEDS_GPU();
  const Mask masks[] = {{.causal = true, .chunk = 90},
                        {.causal = true, .chunk = 60, .lookback = 1, .prefix = 35},
                        {.chunk = 130},
                        {.causal = true, .window = 50, .prefix = 70},
                        {.causal = true, .window = 40, .clamp_ranges = true}};
  for (const DType dtype : kTypes)
    for (const Mask& mask : masks)
      for (const int ranks : {1, 2}) {
        const auto own = static_cast<std::int32_t>(reduced(300, 66));
        Serving s{.heads = 2,
                  .kv_heads = 1,
                  .dtype = dtype,
                  .q_lens = {reduced(150, 40), 20, own},
                  .kv_lens = {reduced(700, 200), 50, own}};
        s.mask = mask;
        s.page = ranks == 1 ? 0 : 16;
        s.alibi = ranks == 1 ? Alibi::query : Alibi::context;
        if (mask.prefix > 0) s.prefix = {20, static_cast<std::int32_t>(mask.prefix), 0};
        if (mask.prefix == 0) s.bidirectional = {165, 180, 190, 200, 20, 45, 45, 50, 0, 30, 30, 66};
        check_dealt(s, {.ranks = ranks});
      }
}

TEST(Features, WhatEachSequenceHides) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (const int ranks : {1, 2})
      for (const int what : {0, 1, 2})
        for (const bool causal : {false, true}) {
          Serving s{.heads = 2,
                    .kv_heads = 1,
                    .dtype = dtype,
                    .q_lens = {reduced(150, 40), 20, reduced(300, 66)},
                    .kv_lens = {reduced(700, 200), 50, reduced(300, 130)}};
          s.mask = {.causal = causal, .window = what == 1 ? 200 : 0};
          s.page = ranks == 1 ? 0 : 16;
          check_dealt(hidden_in_a_batch(s, what), {.ranks = ranks, .invariant = what == 2});
        }
}

/// A state for each part of the keys; parts past the end are empty states.
TEST(Features, PartsOfTheKeys) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (const DType kv : {dtype, DType::e4m3})
      for (const kernels::KeyParts parts :
           {kernels::KeyParts{.count = 16}, kernels::KeyParts{.count = 5, .tile = 32},
            kernels::KeyParts{.count = 12, .keys = 100}})
        for (const bool invariant : {false, true}) {
          Serving s = mixed(dtype, kv);
          s.mask.window = parts.count == 5 ? 150 : 0;
          s.page = parts.count == 16 ? 0 : 16;
          s.sinks = s.qq_bias = true;
          check_dealt(s, {.invariant = invariant, .parts = parts});
        }
}

/// Few row tiles over many keys: several blocks share the keys of one.
TEST(Features, SplitsOfTheKeys) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (const DType kv : {dtype, DType::e4m3})
      for (const int q_len : {17, 60, 200})
        for (const bool bounded : {false, true})
          for (const bool invariant : {false, true}) {
            Serving s{.dim = 128,
                      .dtype = dtype,
                      .kv_dtype = kv,
                      .q_lens = {q_len, 1, 30},
                      .kv_lens = {reduced(9000, 1100), 300, reduced(2000, 500)}};
            s.mask.window = q_len == 60 ? 3000 : 0;
            s.skip_decode = bounded;
            check_dealt(
                s, {.ranks = q_len == 200 ? 2 : 1, .invariant = invariant, .bounded = bounded}, 3);
          }
}

/// In the fixed order neither pages nor ranks nor splits change a bit.
TEST(Features, FixedOrderKeepsTheBits) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (const DType kv : stored(dtype))
      for (const Layout layout : {Layout::contiguous, Layout::interleaved}) {
        const std::uint64_t seed = fresh_seed();
        Serving s{.dtype = dtype,
                  .kv_dtype = kv,
                  .q_lens = {70, 20},
                  .kv_lens = {reduced(5000, 400), reduced(900, 150)}};
        if (reduction()) s.heads = 2, s.kv_heads = 1;
        if (is_left_out(30 * work_of(s))) continue;
        s.alibi = Alibi::query;
        s.qq_bias = true;
        s.page = 0;
        const ServingProblem rows(s, seed);
        const ServingResult one = check_dealt(rows, {.layout = layout, .invariant = true}, seed, 3);
        for (const int ranks : {2, 4}) {
          const Dealt dealt{.layout = layout, .ranks = ranks, .invariant = true};
          SCOPED_TRACE(trace(s, dealt, seed));
          expect_same_bits(one, run_dealt(rows, dealt));
        }
        for (const int page : {1, 16, 48, 544})
          for (const bool x_packed : {false, true}) {
            s.page = page;
            s.x_packed = x_packed;
            const Dealt dealt{.layout = layout, .invariant = true, .bounded = false};
            SCOPED_TRACE(trace(s, dealt, seed));
            expect_same_bits(one, run_dealt(ServingProblem(s, seed), dealt));
          }
      }
}

TEST(Features, AllTogether) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (const DType kv : {DType::e4m3, DType::e5m2})
      for (const int ranks : {1, 2, 4})
        for (const std::int64_t block : {0, 1, 16, 128})
          for (const bool invariant : {false, true}) {
            Serving s{.heads = 10,
                      .kv_heads = 2,
                      .dim = 96,
                      .dtype = dtype,
                      .q_dtype = kv,
                      .kv_dtype = kv,
                      .out_dtype = DType::e4m3,
                      .q_lens = {reduced(90, 40), 1, 20, 16, 3},
                      .kv_lens = {reduced(1000, 300), 300, 20, reduced(700, 200), 130}};
            s.mask.window = 600;
            s.causal = {1, 1, 0, 1, 0};
            s.softcap = 20;
            s.alibi = Alibi::query;
            s.qq_bias = s.sinks = s.per_head_scales = true;
            s.x_packed = block != 16;
            s.skip_decode = block == 128;
            const Layout layout = block == 0 ? Layout::ranges : Layout::interleaved;
            check_dealt(s, {layout, ranks, block == 0 ? kSegment : block, invariant}, 8);
          }
}

/// Elements of the cache are counted in 64 bits.
TEST(Features, CacheOfMoreThanTwoToThe31Elements) {
  LONGSPAN_NEEDS_GPU();
  LONGSPAN_NEEDS_MORE_THAN_A_SIMULATOR("caches of 6 GB and 12 GB, each copied several times");
  for (const DType dtype : {DType::bf16, DType::fp32}) {
    Serving s{.dtype = dtype, .kv_dtype = DType::e4m3, .q_lens = {40, 1}, .kv_lens = {300, 100}};
    s.padding = 100'000'000;  // between its 29 pages
    check_dealt(s);
  }
}

}  // namespace
}  // namespace longspan::tests
