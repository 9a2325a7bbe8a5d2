// Short queries and fp32 with all serving features, on simulated ranks of one GPU: trees of drafts,
// shards interleaved by tokens, pages of every size and layout, fp8, ALiBi, parts of the keys.
// Exact by float64; bitwise where the fixed order promises it. A problem's caches hold NaN, and its
// tables -1 or garbage, in all places that no row may see.
#include <cmath>
#include <random>
#include <vector>

#include "tests/gpu/serving_ranks.hpp"

namespace longspan::tests {
namespace {

constexpr std::int64_t kEveryRow = 0;

ServingResult check(const ServingProblem& problem, const Dealt& setup, std::uint64_t seed) {
  return check_dealt(problem, setup, seed, kEveryRow);
}
void check(const Serving& s, const Dealt& setup = {}) { check_dealt(s, setup, kEveryRow); }

/// The possible types of a cache for products of a dtype.
std::vector<DType> stored(DType dtype) { return {dtype, DType::e4m3, DType::e5m2}; }

constexpr DType kTypes[] = {DType::bf16, DType::fp16, DType::fp32};

/// A tree of 2 to 8 draft tokens for each sequence, verified over a sharded cache.
TEST(DecodeFeatures, TreesOnInterleavedShards) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (const std::int64_t block : {1, 16, 128})
      for (const int ranks : {1, 2, 4})
        for (const bool alibi : {false, true}) {
          Serving s{.dtype = dtype, .q_lens = {2, 3, 5, 8}, .kv_lens = {300, 77, 1030, 8}};
          s.qq_bias = s.sinks = true;
          if (alibi) s.alibi = Alibi::query;
          check(s, {Layout::interleaved, ranks, block});
        }
}

TEST(DecodeFeatures, SpeculativeRowsHaveTheirOwnCausalBound) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (int q_len = 2; q_len <= 8; ++q_len)
      for (const Layout layout : {Layout::contiguous, Layout::striped, Layout::zigzag})
        check({.heads = 6,
               .kv_heads = 2,
               .dtype = dtype,
               .q_lens = {q_len, 1, q_len},
               .kv_lens = {q_len, 500, 129}},
              {layout, 2});
}

TEST(DecodeFeatures, AlignedShardsKeepTheBits) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (const DType kv : stored(dtype))
      for (const Layout layout : {Layout::contiguous, Layout::interleaved})
        for (const Alibi alibi : {Alibi::context, Alibi::query}) {
          const std::uint64_t seed = fresh_seed();
          Serving s{
              .dtype = dtype, .kv_dtype = kv, .q_lens = {1, 4, 8}, .kv_lens = {3000, 900, 70}};
          if (is_left_out(8 * work_of(s, 2))) continue;
          s.alibi = alibi;
          s.qq_bias = true;
          s.mask.window = 2500;
          const ServingProblem problem(s, seed);
          const ServingResult one = check(problem, {layout, 1}, seed);
          for (const int ranks : {2, 4}) {
            SCOPED_TRACE(trace(s, {layout, ranks}, seed));
            expect_same_bits(one, run_dealt(problem, {layout, ranks}));
          }
        }
}

/// The place and the layout of a key do not affect the arithmetic.
TEST(DecodeFeatures, PagesHaveTheBitsOfContiguousRows) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (const DType kv : stored(dtype))
      for (const std::vector<std::int32_t>& q_lens : {std::vector{1, 1}, std::vector{3, 16}}) {
        const std::uint64_t seed = fresh_seed();
        Serving s{
            .dim = 128, .dtype = dtype, .kv_dtype = kv, .q_lens = q_lens, .kv_lens = {1500, 333}};
        if (reduction()) s.heads = 4, s.kv_lens[0] = 700;
        if (is_left_out(10 * work_of(s))) continue;
        s.page = 0;
        const ServingResult rows = check(ServingProblem(s, seed), {}, seed);
        for (const int page : {1, 16, 48, 544})
          for (const bool x_packed : {false, true}) {
            s.page = page;
            s.x_packed = x_packed;
            SCOPED_TRACE(trace(s, {}, seed));
            expect_same_bits(rows, run_dealt(ServingProblem(s, seed), {}));
          }
      }
}

TEST(DecodeFeatures, PageSizesAndLayouts) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (const DType kv : stored(dtype))
      for (const int page : {1, 8, 16, 32, 64, 128, 256, 544})
        for (const bool x_packed : {false, true}) {
          Serving s{.dtype = dtype, .kv_dtype = kv, .q_lens = {1, 7}, .kv_lens = {1200, 333}};
          s.page = page;
          s.x_packed = x_packed;
          s.padding = page == 32 ? 24 : 0;
          s.per_head_scales = page == 16;
          check(s, {Layout::interleaved, page == 64 ? 2 : 1, 16});
        }
}

/// Two parts of many segments each are a work tile each, whose states wait on many levels: in
/// registers, in shared memory, in global memory.
TEST(DecodeFeatures, ManySegmentsToAPiece) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : {DType::bf16, DType::fp16})
    for (const DType kv : stored(dtype))
      for (const int dim : {64, 128, 256})
        for (const int q_len : {1, 5})
          check({.heads = 4,
                 .kv_heads = 1,
                 .dim = dim,
                 .dtype = dtype,
                 .kv_dtype = kv,
                 .q_lens = {q_len, q_len},
                 .kv_lens = {reduced(20000, 5000), reduced(9001, 2001)}},
                {.parts = {.count = 2}});
}

/// Queries become fp16 beside fp8 keys, with their own power of two. A power of two on the queries
/// and its inverse on the scale change no bit, far beyond the range of fp16. Rows of very different
/// sizes do not disturb each other.
TEST(DecodeFeatures, Fp8KeysTakeQueriesOfAnySize) {
  LONGSPAN_NEEDS_GPU();
  for (const DType kv : {DType::e4m3, DType::e5m2}) {
    Serving s{.dtype = DType::bf16, .kv_dtype = kv, .q_lens = {1, 3}, .kv_lens = {700, 300}};
    s.scale = 0.125f;
    if (is_left_out(5 * work_of(s))) continue;
    const std::uint64_t seed = fresh_seed();
    ServingProblem problem(s, seed);
    const ServingResult usual = check(problem, {}, seed);
    const auto count = static_cast<std::int64_t>(problem.q.size() / size_of(DType::bf16));
    const auto times = [&](std::int64_t i, float factor) {
      launcher::store(
          problem.q.data(), DType::bf16, i,
          static_cast<float>(launcher::load(problem.q.data(), DType::bf16, i)) * factor);
    };
    for (const int power : {60, -120}) {
      for (std::int64_t i = 0; i < count; ++i) times(i, std::ldexp(1.0f, power));
      problem.shape.scale = std::ldexp(problem.shape.scale, -power);
      SCOPED_TRACE(trace(s, {}, seed));
      expect_same_bits(usual, run_dealt(problem, {}));
    }
    // Now 2^-60: back to order 1, and every second row 2^40 times as large as the others.
    problem.shape.scale = 0.125f;
    for (std::int64_t i = 0; i < count; ++i)
      times(i, std::ldexp(1.0f, i / s.dim % 2 == 0 ? 60 : 100));
    const ServingResult mixed = run_dealt(problem, {});
    for (std::size_t row = 0; row < usual.lse.size(); row += 2)
      EXPECT_EQ(mixed.lse[row], usual.lse[row]) << row;
  }
}

TEST(DecodeFeatures, HeadDimsAndGroups) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (const DType kv : {dtype, DType::e4m3}) {
      for (const int dim : {16, 24, 32, 40, 64, 80, 96, 112, 128, 136, 192, 200, 256})
        for (const int q_len : {1, 9})
          check({.heads = 4,
                 .kv_heads = 2,
                 .dim = dim,
                 .dtype = dtype,
                 .kv_dtype = kv,
                 .q_lens = {q_len},
                 .kv_lens = {700}});
      for (const int group : {1, 2, 5, 7, 16, 64})
        check({.heads = 2 * group,
               .kv_heads = 2,
               .dtype = dtype,
               .kv_dtype = kv,
               .q_lens = {1, 3},
               .kv_lens = {400, 150},
               .alibi = Alibi::context});
    }
}

/// Pages outside the window hold NaN, and their entries of the table are garbage.
TEST(DecodeFeatures, WindowsOverPages) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (const DType kv : {dtype, DType::e4m3})
      for (const Mask& mask :
           {Mask{.causal = true, .window = 1}, Mask{.causal = true, .window = 100},
            Mask{.window = 64, .right = 3}, Mask{.causal = true, .window = 700}})
        for (const int ranks : {1, 4})
          for (const int page : {16, 64}) {
            Serving s{
                .dtype = dtype, .kv_dtype = kv, .q_lens = {1, 6, 16}, .kv_lens = {2000, 777, 40}};
            s.mask = mask;
            s.page = page;
            check(s, {Layout::interleaved, ranks, 16});
          }
}

TEST(DecodeFeatures, ScoresAndFlags) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (const int ranks : {1, 2}) {
      Serving s{.dtype = dtype, .q_lens = {1, 8, 2}, .kv_lens = {640, 200, 900}};
      for (const Alibi alibi : {Alibi::context, Alibi::query}) {
        s.alibi = alibi;
        s.softcap = alibi == Alibi::query ? 5.0f : 0.0f;
        s.small_dtype = dtype;
        check(s, {Layout::contiguous, ranks});
      }
      s.alibi = {};
      s.softcap = 0.001f;  // scores / cap far beyond 88
      check(s, {Layout::striped, ranks});
      s.softcap = 0;
      s.causal = {1, 0, 1};
      s.q_dtype = DType::e4m3;
      s.kv_dtype = DType::e5m2;
      s.per_head_scales = true;
      check(s, {Layout::contiguous, ranks});
    }
}

TEST(DecodeFeatures, DocumentsInOneSequence) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (const int ranks : {1, 2})
      for (const std::vector<std::int64_t>& documents :
           {std::vector<std::int64_t>{0, 300, 493, 496, 500},
            std::vector<std::int64_t>{10, 300, 494, 498}}) {
        Serving s{.dtype = dtype, .q_lens = {12}, .kv_lens = {500}};
        s.documents = documents;
        check(s, {Layout::contiguous, ranks});
      }
}

TEST(DecodeFeatures, ChunksRangesAndPrefixes) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (const int ranks : {1, 2})
      for (const Mask& mask :
           {Mask{.causal = true, .chunk = 128}, Mask{.causal = true, .window = 200, .prefix = 150},
            Mask{.chunk = 50, .lookback = 2, .prefix = 10}, Mask{.causal = true, .window = 9}}) {
        Serving s{.dtype = dtype, .q_lens = {1, 12, 3, 16}, .kv_lens = {500, 130, 1000, 300}};
        s.mask = mask;
        if (mask.prefix > 100) s.prefix = {150, 3, 0, 40};
        if (mask.prefix == 0) s.bidirectional = {400, 500, 90, 125, 998, 999, 280, 290};
        check(s, {Layout::contiguous, ranks});
      }
}

TEST(DecodeFeatures, WhatEachSequenceHides) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (const int ranks : {1, 2})
      for (const int what : {0, 1, 2}) {
        Serving s{.dtype = dtype, .q_lens = {1, 12, 3, 16}, .kv_lens = {500, 130, 1000, 300}};
        check(hidden_in_a_batch(s, what), {Layout::contiguous, ranks});
        s.mask.window = 300;
        check(hidden_in_a_batch(s, what), {Layout::interleaved, ranks});
      }
}

/// Rows of sequences of one query keep their contents.
TEST(DecodeFeatures, DecodeRowsSkipped) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (const std::int32_t kv_len : {700, reduced(70000, 4000)}) {  // one split, and many
      Serving s{.dtype = dtype, .q_lens = {1, 4, 1, 8}, .kv_lens = {300, kv_len, 20, 9}};
      s.skip_decode = true;
      check(s);
    }
}

/// A state for each part of the keys; parts past the end are empty states.
TEST(DecodeFeatures, PartsOfTheKeys) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (const DType kv : {dtype, DType::e4m3})
      for (const kernels::KeyParts parts :
           {kernels::KeyParts{.count = 16}, kernels::KeyParts{.count = 5, .tile = 32},
            kernels::KeyParts{.count = 12, .keys = 100},
            kernels::KeyParts{.count = 9, .keys = 128}}) {
        Serving s{.dtype = dtype, .kv_dtype = kv, .q_lens = {1, 3, 1}, .kv_lens = {1100, 260, 5}};
        s.mask.window = parts.count == 5 ? 150 : 0;
        s.sinks = s.qq_bias = true;
        check(s, {.parts = parts});
      }
}

/// A sequence alone and among others; the batch may take the other size of row tile.
TEST(DecodeFeatures, TheBatchAroundChangesNoBit) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (const DType kv : stored(dtype))
      for (const int q_len : {1, 5, 16}) {
        const std::uint64_t seed = fresh_seed();
        const int length = reduced(5000, 1300);
        Serving s{.dtype = dtype, .kv_dtype = kv, .q_lens = {q_len}, .kv_lens = {length}};
        if (is_left_out(6 * work_of(s))) continue;
        s.alibi = Alibi::query;
        s.qq_bias = true;
        const ServingResult alone = check(ServingProblem(s, seed), {}, seed);
        for (const int other : {1, q_len}) {
          s.q_lens = {q_len, other, 1, other};
          s.kv_lens = {length, 300, reduced(7000, 1700), 64};
          SCOPED_TRACE(trace(s, {}, seed));
          ServingResult whole = run_dealt(ServingProblem(s, seed), {});
          whole.out.resize(alone.out.size());
          whole.lse.resize(alone.lse.size());
          expect_same_bits(alone, whole);
        }
      }
}

/// More pieces than fit on a GPU: they are handed out, those of long sequences first.
TEST(DecodeFeatures, ManySequencesOfDifferentLengths) {
  LONGSPAN_NEEDS_GPU();
  for (const DType kv : stored(DType::bf16))
    for (const int batch : {reduced(40, 10), reduced(128, 20), reduced(150, 30)}) {
      const std::uint64_t seed = fresh_seed();
      std::mt19937 random(static_cast<unsigned>(seed));
      Serving s{.heads = 16, .kv_heads = 8, .dim = 64, .dtype = DType::bf16, .kv_dtype = kv};
      s.q_lens.clear();
      s.kv_lens.clear();
      for (int b = 0; b < batch; ++b) {
        const double log2 = std::uniform_real_distribution<double>(0, 11.5)(random);
        s.q_lens.push_back(1 + b % 2);
        s.kv_lens.push_back(b % 7 == 0 ? 1000 : 2 + static_cast<int>(std::exp2(log2)));
      }
      if (reduction()) s.heads = 4, s.kv_heads = 2;
      if (is_left_out(3 * work_of(s))) continue;
      const ServingProblem problem(s, seed);
      const ServingResult one = check(problem, {Layout::interleaved, 1}, seed);
      SCOPED_TRACE(trace(s, {Layout::interleaved, 2}, seed));
      expect_same_bits(one, run_dealt(problem, {Layout::interleaved, 2}));
    }
}

/// Just past a power of two half of the tree's places are empty, and pieces are cut finer.
TEST(DecodeFeatures, LengthsAroundAPowerOfTwo) {
  LONGSPAN_NEEDS_GPU();
  for (const DType kv : stored(DType::bf16))
    for (const int more : {-kSegment, 0, 1, 130, 5000}) {
      Serving s{.heads = 16,
                .kv_heads = 8,
                .dtype = DType::bf16,
                .kv_dtype = kv,
                .q_lens = {1},
                .kv_lens = {reduced(16384, 2048) + more}};
      if (reduction()) s.heads = 4, s.kv_heads = 2;
      if (is_left_out(8 * work_of(s))) continue;
      const std::uint64_t seed = fresh_seed();
      const ServingProblem problem(s, seed);
      for (const Layout layout : {Layout::contiguous, Layout::interleaved}) {
        const ServingResult one = check(problem, {layout, 1}, seed);
        for (const int ranks : {2, 4}) {
          SCOPED_TRACE(trace(s, {layout, ranks}, seed));
          expect_same_bits(one, run_dealt(problem, {layout, ranks}));
        }
      }
    }
}

TEST(DecodeFeatures, AllTogether) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (const int ranks : {1, 2, 4})
      for (const std::int64_t block : {1, 128}) {
        Serving s{.heads = 10,
                  .kv_heads = 2,
                  .dim = 96,
                  .dtype = dtype,
                  .q_dtype = DType::e4m3,
                  .kv_dtype = DType::e4m3,
                  .out_dtype = DType::e4m3,
                  .q_lens = {1, 7, 16, 1},
                  .kv_lens = {1000, 2100, 16, 0}};
        s.kv_lens[3] = 1;
        s.mask.window = 900;
        s.causal = {1, 1, 0, 1};
        s.softcap = 20;
        s.alibi = Alibi::query;
        s.qq_bias = s.sinks = s.per_head_scales = s.x_packed = true;
        check(s, {Layout::interleaved, ranks, block});
      }
}

}  // namespace
}  // namespace longspan::tests
