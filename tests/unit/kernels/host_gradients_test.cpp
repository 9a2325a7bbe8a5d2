// Gradients on the host, against float64: masks, scores, groups, batches, any dims, shards of the
// keys; and their bits.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/fresh_seed.hpp"
#include "tests/support/host_gradients.hpp"

namespace longspan::tests {
namespace {

std::vector<Shard> one() { return {Shard::contiguous(0, 0, 1)}; }

void expect_exact(const HostShape& shape, const std::vector<Shard>& shards = one(),
                  const std::vector<float>& sinks = {}) {
  const std::uint32_t seed = fresh_seed();
  HostGradients problem(shape, seed);
  problem.sinks = sinks;
  const GradientResult<double> exact = problem.plain<double>();
  const GradientBounds bounds(problem, problem.problem.run(*kernels::host_backend(1), shards,
                                                           sinks.empty() ? nullptr : &sinks));
  for (const int threads : {1, 3}) {  // heads by themselves, and two passes
    const auto backend = kernels::host_backend(threads);
    for (const bool invariant : {false, true}) {
      SCOPED_TRACE(std::to_string(threads) + " threads, invariant " + std::to_string(invariant) +
                   ", seed " + std::to_string(seed));
      EXPECT_TRUE(is_close(problem.run(*backend, shards, invariant), exact, bounds));
    }
  }
}

TEST(HostGradients, EachFeatureAlone) {
  const HostShape causal{.query_len = {200}, .kv_len = {300}, .mask = {.causal = true}};
  for (HostShape s :
       {causal, HostShape{.query_len = {150}, .kv_len = {150}},
        HostShape{.heads = 2, .kv_heads = 2, .query_len = {70}, .kv_len = {200}},
        HostShape{.heads = 6, .kv_heads = 1, .dim = 40, .query_len = {33}, .kv_len = {129}},
        HostShape{.heads = 6, .kv_heads = 1, .dim = 21, .query_len = {33}, .kv_len = {129}},
        HostShape{.dim = 1, .query_len = {20}, .kv_len = {129}, .mask = {.causal = true}},
        HostShape{.dim = 203, .query_len = {20}, .kv_len = {129}, .mask = {.causal = true}},
        HostShape{.query_len = {140}, .kv_len = {300}, .mask = {.causal = true, .window = 50}},
        HostShape{.query_len = {140}, .kv_len = {300}, .mask = {.window = 50, .right = 20}},
        HostShape{.query_len = {90}, .kv_len = {90}, .softcap = 1.5f}})
    expect_exact(s);
}

TEST(HostGradients, Biases) {
  for (const Alibi alibi : {Alibi::context, Alibi::query, Alibi::sqrt}) {
    HostShape s{.query_len = {60}, .kv_len = {200}, .mask = {.causal = true}};
    s.alibi = alibi;
    s.qq = true;
    s.softcap = 2;
    expect_exact(s);
    s.query_len = {60, 0, 90, 7};  // a matrix that all sequences and heads share
    s.kv_len = {200, 150, 90, 300};
    s.heads = 6;
    s.slopes_of_sequences = alibi != Alibi::context;
    expect_exact(s, HostProblem::on_all(Shard::zigzag(0, 0, 3)));
  }
}

TEST(HostGradients, Sinks) {
  expect_exact({.query_len = {70}, .kv_len = {200}, .mask = {.causal = true}}, one(),
               {0.5f, -1.0f, 3.0f, 0.0f});
}

/// The weight of a row's only key is 1 whatever its score is, so that D is dP to the bit.
TEST(HostGradients, TheScoreOfAnOnlyKeyHasNone) {
  for (const int dim : {64, 21, 203}) {
    const HostShape shape{
        .dim = dim, .query_len = {70}, .kv_len = {200}, .mask = {.causal = true, .window = 1}};
    HostGradients problem(shape, fresh_seed(), false);
    const auto found = problem.run(*kernels::host_backend(2), one());
    for (const auto* gradient : {&found.dq, &found.dk})
      EXPECT_EQ(std::count(gradient->begin(), gradient->end(), 0.0f), std::ssize(*gradient)) << dim;
  }
}

TEST(HostGradients, BatchesOfDifferentLengths) {
  HostShape s{.query_len = {130, 1, 0, 40, 7}, .kv_len = {130, 300, 20, 40, 0}};
  s.causal = {1, 0, 1, 1, 1};
  expect_exact(s);
}

TEST(HostGradients, Documents) {
  HostShape s{.query_len = {400}, .kv_len = {400}, .mask = {.causal = true}};
  s.documents = {20, 130, 131, 350, 390};
  expect_exact(s);
}

TEST(HostGradients, ShardsOfKeys) {
  const HostShape s{.query_len = {180, 64}, .kv_len = {300, 500}, .mask = {.causal = true}};
  for (const Shard& shard : {Shard::contiguous(0, 0, 2), Shard::zigzag(0, 0, 2),
                             Shard::striped(0, 0, 3), Shard::interleaved(0, 0, 4, 16)})
    expect_exact(s, HostProblem::on_all(shard));
}

TEST(HostGradients, BitsDoNotDependOnThreads) {
  for (const bool invariant : {false, true}) {
    HostShape shape{
        .heads = 8, .kv_heads = 4, .query_len = {500}, .kv_len = {700}, .mask = {.causal = true}};
    shape.alibi = Alibi::query;
    shape.qq = true;
    HostGradients problem(shape, fresh_seed());
    const auto first = problem.run(*kernels::host_backend(1), one(), invariant);
    for (const int threads : {2, 3, 5, 8})
      EXPECT_TRUE(problem.run(*kernels::host_backend(threads), one(), invariant) == first)
          << threads;
  }
}

/// NaN in keys, values and rows that a mask hides does not reach what it hides them from.
TEST(HostGradients, HiddenNaN) {
  HostShape shape{.heads = 2,
                  .kv_heads = 1,
                  .query_len = {40},
                  .kv_len = {300},
                  .mask = {.window = 30, .right = 0}};
  const std::uint32_t seed = fresh_seed();
  HostGradients clean(shape, seed), dirty(shape, seed);
  const std::int64_t row = dirty.problem.kv_stride();
  for (std::int64_t j = 0; j < 200; ++j)  // nobody sees these keys
    for (int c = 0; c < shape.dim; ++c) {
      dirty.problem.k.set(j * row + c, kNan);
      dirty.problem.v.set(j * row + c, kNan);
    }
  const auto backend = kernels::host_backend(2);
  EXPECT_TRUE(dirty.run(*backend, one()) == clean.run(*backend, one()));
}

/// NaN in the gradient of one row reaches only the keys that the row sees.
TEST(HostGradients, NaNStaysWithItsRow) {
  HostShape shape{.heads = 1,
                  .kv_heads = 1,
                  .query_len = {100},
                  .kv_len = {100},
                  .mask = {.causal = true, .window = 10}};
  HostGradients problem(shape, fresh_seed());
  for (int c = 0; c < shape.dim; ++c) problem.dout[50 * shape.dim + c] = kNan;
  const auto found = problem.run(*kernels::host_backend(1), one());
  for (std::int64_t j = 0; j < 100; ++j) {
    const bool is_seen = j > 40 && j <= 50;
    EXPECT_EQ(std::isnan(found.dk[j * shape.dim]), is_seen) << j;
    EXPECT_EQ(std::isnan(found.dv[j * shape.dim]), is_seen) << j;
    EXPECT_EQ(std::isnan(found.dq[j * shape.dim]), j == 50) << j;
  }
}

}  // namespace
}  // namespace longspan::tests
