// Empty is a value, and NaN stays in its place: a NaN query in its own row, and NaN or infinity in
// keys that no row sees in no row at all.
#include "tests/gpu/gpu_judge.hpp"

namespace longspan::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

void fill(std::vector<std::byte>& rows, const Case& c, std::int64_t first, std::int64_t count,
          int heads, float value) {
  for (std::int64_t i = first * heads * c.dim; i < (first + count) * heads * c.dim; ++i)
    launcher::store(rows.data(), c.dtype, i, value);
}

const DType kTypes[] = {DType::bf16, DType::fp16, DType::fp32};

TEST(Nan, QueryStaysInItsRow) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (int q_len : {7, 40}) {
      const Case c{.dtype = dtype,
                   .heads = 4,
                   .kv_heads = 2,
                   .dim = 64,
                   .q_lens = {q_len},
                   .kv_lens = {500},
                   .mask = {.causal = true},
                   .ranks = 2,
                   .seed = fresh_seed()};
      if (is_left_out(2 * work_of(c))) continue;
      Data data(c);
      const Result clean = GpuRun(c, data).run();
      const std::int64_t bad = 3 * c.heads + 2;  // token 3, head 2
      launcher::store(data.q.data(), dtype, bad * c.dim + 5, kNan);
      const Result result = GpuRun(c, data).run();
      for (std::int64_t row = 0; row < q_len * c.heads; ++row) {
        EXPECT_EQ(std::isnan(result.lse[static_cast<std::size_t>(row)]), row == bad) << row;
        for (int d = 0; d < c.dim; ++d) {
          const std::int64_t at = row * c.dim + d;
          const double value = launcher::load(result.out.data(), dtype, at);
          if (row == bad)
            EXPECT_TRUE(std::isnan(value));
          else
            EXPECT_EQ(value, launcher::load(clean.out.data(), dtype, at));
        }
      }
    }
}

/// Positions outside every window, and keys after the last visible one, hold NaN and infinities.
TEST(Nan, UnseenKeysReachNoOutput) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (Layout layout :
         {Layout::contiguous, Layout::striped, Layout::interleaved, Layout::zigzag, Layout::listed})
      for (int q_len : {6, 90})
        for (bool invariant : {false, true}) {
          const Case c{.dtype = dtype,
                       .heads = 4,
                       .kv_heads = 2,
                       .dim = 64,
                       .q_lens = {q_len},
                       .kv_lens = {700},
                       .mask = {.window = 100, .right = 0},
                       .layout = layout,
                       .ranks = 2,
                       .invariant = invariant,
                       .seed = fresh_seed()};
          if (is_left_out(2 * work_of(c))) continue;
          Data data(c);
          const Result clean = GpuRun(c, data).run();
          const std::int64_t unseen = 700 - q_len - 99;  // the first token's window begins here
          fill(data.k[0], c, 0, unseen, c.kv_heads, kNan);
          fill(data.v[0], c, 0, unseen, c.kv_heads, std::numeric_limits<float>::infinity());
          SCOPED_TRACE(::testing::Message() << c);
          expect_same_bits(clean, GpuRun(c, data).run());
        }
}

TEST(Nan, KeysPastALengthReachNoOutput) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (int q_len : {2, 64}) {
      Case c{.dtype = dtype,
             .heads = 4,
             .kv_heads = 2,
             .dim = 64,
             .q_lens = {q_len},
             .kv_lens = {300},
             .device_lengths = true,
             .seed = fresh_seed()};
      if (is_left_out(2 * work_of(c))) continue;
      Data data(c);
      const Result clean = GpuRun(c, data).run();
      Case longer = c;  // the same keys, and after them slots that hold NaN
      longer.kv_lens = {400};
      const std::size_t bytes = data.k[0].size() / 300 * 400;
      data.k[0].resize(bytes);
      data.v[0].resize(bytes);
      fill(data.k[0], c, 300, 100, c.kv_heads, kNan);
      fill(data.v[0], c, 300, 100, c.kv_heads, kNan);
      GpuRun run(longer, data);
      const std::int32_t len = 300;
      ASSERT_EQ(cudaMemcpy(run.kv_len().data(), &len, 4, cudaMemcpyDefault), cudaSuccess);
      expect_same_bits(clean, run.run());
    }
}

/// Keys whose score is -inf are invisible; a row with only such keys is empty.
TEST(Nan, MinusInfinityIsInvisible) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (int q_len : {3, 50})
      for (int lost : {40, 200}) {
        const Case c{.dtype = dtype,
                     .heads = 2,
                     .kv_heads = 1,
                     .dim = 32,
                     .q_lens = {q_len},
                     .kv_lens = {200},
                     .seed = fresh_seed()};
        if (is_left_out(work_of(c))) continue;
        Data data(c);
        // Only column 0 matters, and it is positive in every query: k = -inf there scores -inf.
        for (std::int64_t row = 0; row < q_len * c.heads; ++row)
          launcher::store(data.q.data(), dtype, row * c.dim, 1.0f);
        for (std::int64_t key = 0; key < lost; ++key)
          launcher::store(data.k[0].data(), dtype, key * c.dim,
                          -std::numeric_limits<float>::infinity());
        const Result result = GpuRun(c, data).run();
        Case rest = c;
        rest.kv_lens = {200 - lost};
        Data kept = data;
        kept.k[0].erase(kept.k[0].begin(),
                        kept.k[0].begin() + static_cast<std::ptrdiff_t>(
                                                lost * c.dim * static_cast<int>(size_of(dtype))));
        kept.v[0].erase(kept.v[0].begin(),
                        kept.v[0].begin() + static_cast<std::ptrdiff_t>(
                                                lost * c.dim * static_cast<int>(size_of(dtype))));
        expect_exact(rest, kept, result);
      }
}

TEST(Nan, NothingVisibleIsZeroAndMinusInfinity) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (int q_len : {4, 80})
      for (bool sinks : {false, true}) {
        const Case c{.dtype = dtype,
                     .q_lens = {q_len},
                     .kv_lens = {0},
                     .ranks = 4,
                     .sinks = sinks,
                     .seed = fresh_seed()};
        if (is_left_out(work_of(c))) continue;
        const Data data(c);
        const Result result = GpuRun(c, data).run();
        for (std::int64_t i = 0; i < c.tokens() * c.heads * c.dim; ++i)
          ASSERT_EQ(launcher::load(result.out.data(), dtype, i), 0.0);
        for (std::size_t row = 0; row < result.lse.size(); ++row) {
          if (sinks)
            ASSERT_NEAR(result.lse[row], data.sinks[row % static_cast<std::size_t>(c.heads)], 1e-6);
          else
            ASSERT_EQ(result.lse[row], -std::numeric_limits<float>::infinity());
        }
      }
}

}  // namespace
}  // namespace longspan::test
