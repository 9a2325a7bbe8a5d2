// Gradients by the CPU's own products of bf16 (DTypes::bf16_products): as exact as weights in bf16
// allow, with each feature; their bits; and NaN. On a machine without the instructions the option
// changes no bit, and only that is tested.
#include "kernels/host/targets.hpp"
//
#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/host/gradient_tile.hpp"
#include "tests/support/fresh_seed.hpp"
#include "tests/support/host_gradients.hpp"

namespace longspan::tests {
namespace {

std::vector<Shard> one() { return {Shard::contiguous(0, 0, 1)}; }

HostGradients bf16_problem(const HostShape& shape, std::uint32_t seed = fresh_seed()) {
  return {shape, seed, true, bf16};
}

class HostBf16Gradients : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!kernels::host::has_bf16_gradients()) GTEST_SKIP() << "no instructions for bf16 products";
  }
};

/// P and dX rounded to bf16 are off by at most 2^-9 of themselves. One ulp of the largest gradient
/// is 2^-7 of it.
void expect_right(HostGradients& problem, const std::vector<Shard>& shards = one()) {
  const GradientResult<double> exact = problem.plain<double>();
  const auto largest_of = [](const std::vector<double>& x) {
    double most = 0;
    for (const double each : x) most = std::max(most, std::abs(each));
    return most;
  };
  const auto check = [&](const char* name, const std::vector<float>& found,
                         const std::vector<double>& e, double largest) {
    ASSERT_EQ(found.size(), e.size());
    double error = 0;
    for (std::size_t i = 0; i < e.size(); ++i) {
      const double off = std::abs(found[i] - e[i]);
      if (!(off <= error)) error = off;  // keeps a NaN
    }
    EXPECT_LE(error, 0x1p-7 * largest + 1e-6) << name;
  };
  for (const int threads : {1, 3})  // heads by themselves, and two passes
    for (const bool invariant : {false, true}) {
      SCOPED_TRACE(std::to_string(threads) + " threads, invariant " + std::to_string(invariant));
      const auto found = problem.run(*kernels::host_backend(threads), shards, invariant);
      check("dq", found.dq, exact.dq, largest_of(exact.dq));
      check("dk", found.dk, exact.dk, largest_of(exact.dk));
      check("dv", found.dv, exact.dv, largest_of(exact.dv));
      check("dslopes", found.dslopes, exact.dslopes, largest_of(exact.slope_terms));
      check("dqq", found.dqq, exact.dqq, largest_of(exact.qq_terms));
    }
}

TEST_F(HostBf16Gradients, EveryDim) {
  for (const int dim : {1, 2, 15, 16, 21, 40, 48, 64, 80, 96, 128, 203, 512}) {
    SCOPED_TRACE(dim);
    HostShape shape = bf16_shape(dim > 128 ? 20 : 101, 300, dim);
    shape.mask.causal = dim % 2 == 0;
    HostGradients problem = bf16_problem(shape);
    expect_right(problem);
  }
}

TEST_F(HostBf16Gradients, EveryLength) {
  for (const std::int32_t queries : {1, 7, 33, 96, 97, 193})
    for (const std::int32_t keys : {1, 15, 129, 257}) {
      SCOPED_TRACE(::testing::Message() << queries << " queries, " << keys << " keys");
      HostShape shape = bf16_shape(queries, std::max(queries, keys), 32);
      shape.heads = shape.kv_heads = 1;  // odd numbers of rows
      shape.mask.causal = (queries + keys) % 2 == 0;
      HostGradients problem = bf16_problem(shape);
      expect_right(problem);
    }
}

TEST_F(HostBf16Gradients, EachFeature) {
  using Change = std::function<void(HostShape&)>;
  const std::vector<std::pair<const char*, Change>> changes{
      {"window", [](HostShape& s) { s.mask = {.causal = true, .window = 50}; }},
      {"both sides", [](HostShape& s) { s.mask = {.window = 40, .right = 9}; }},
      {"softcap", [](HostShape& s) { s.softcap = 5; }},
      {"ALiBi", [](HostShape& s) { s.alibi = Alibi::query, s.mask.causal = true; }},
      {"qq_bias", [](HostShape& s) { s.qq = true; }},
      {"documents", [](HostShape& s) { s.documents = {0, 5, 130, 131, 290, 400}; }},
      {"groups", [](HostShape& s) { s.heads = 12, s.kv_heads = 1; }},
      {"a batch", [](HostShape& s) {
         s.query_len = {130, 1, 0, 40, 7};
         s.kv_len = {130, 300, 20, 40, 0};
         s.mask.causal = true;
       }}};
  for (const auto& [name, change] : changes) {
    SCOPED_TRACE(name);
    HostShape shape = bf16_shape(150, 400);
    change(shape);
    HostGradients problem = bf16_problem(shape);
    expect_right(problem);
    expect_right(problem, HostProblem::on_all(Shard::striped(0, 0, 3)));
  }
}

/// The option has an effect, and only where all factors are bf16.
TEST_F(HostBf16Gradients, RoundsWeights) {
  const std::uint32_t seed = fresh_seed();
  for (const DType dout : {bf16, fp32}) {
    HostShape shape = bf16_shape(60, 300);
    HostGradients problem(shape, seed, true, dout);
    shape.bf16_products = false;
    HostGradients in_fp32(shape, seed, true, dout);
    const auto backend = kernels::host_backend(2);
    const bool rounds = dout == bf16;
    EXPECT_EQ(problem.run(*backend, one()).dv != in_fp32.run(*backend, one()).dv, rounds);
  }
}

TEST_F(HostBf16Gradients, BitsDoNotDependOnThreads) {
  for (const bool invariant : {false, true}) {
    HostShape shape = bf16_shape(500, 700);
    shape.mask.causal = true;
    HostGradients problem = bf16_problem(shape);
    const auto first = problem.run(*kernels::host_backend(1), one(), invariant);
    for (const int threads : {2, 3, 5})
      EXPECT_TRUE(problem.run(*kernels::host_backend(threads), one(), invariant) == first)
          << threads;
  }
}

/// NaN in keys that a mask hides changes no bit.
TEST_F(HostBf16Gradients, HiddenNaN) {
  HostShape shape = bf16_shape(40, 300);
  shape.mask = {.window = 30, .right = 0};
  const std::uint32_t seed = fresh_seed();
  HostGradients clean = bf16_problem(shape, seed), dirty = bf16_problem(shape, seed);
  const std::int64_t row = dirty.problem.kv_stride();
  for (std::int64_t j = 0; j < 200; ++j)  // nobody sees these keys
    for (int c = 0; c < shape.kv_heads * shape.dim; ++c) {
      dirty.problem.k.set(j * row + c, kNan);
      dirty.problem.v.set(j * row + c, c % 2 == 0 ? kNan : INFINITY);
    }
  const auto backend = kernels::host_backend(2);
  EXPECT_TRUE(dirty.run(*backend, one()) == clean.run(*backend, one()));
}

/// NaN in the gradient of one row reaches only the keys that the row sees, and changes no bit of
/// the others; also beside a neighbour with which it shares a pair.
TEST_F(HostBf16Gradients, NaNStaysWithItsRow) {
  HostShape shape = bf16_shape(100, 100);
  shape.heads = shape.kv_heads = 1;
  shape.mask = {.causal = true, .window = 10};
  for (const std::int64_t bad : {50, 51}) {
    const std::uint32_t seed = fresh_seed();
    HostGradients problem = bf16_problem(shape, seed);
    const auto clean = problem.run(*kernels::host_backend(1), one());
    for (int c = 0; c < shape.dim; ++c) problem.dout[bad * shape.dim + c] = kNan;
    const auto found = problem.run(*kernels::host_backend(1), one());
    for (std::int64_t j = 0; j < 100; ++j) {
      const bool is_seen = j > bad - 10 && j <= bad;
      const auto at = j * shape.dim;
      EXPECT_EQ(std::isnan(found.dk[at]), is_seen) << j;
      EXPECT_EQ(std::isnan(found.dv[at]), is_seen) << j;
      EXPECT_EQ(std::isnan(found.dq[at]), j == bad) << j;
      if (!is_seen) {
        EXPECT_EQ(found.dk[at], clean.dk[at]) << j;
        EXPECT_EQ(found.dv[at], clean.dv[at]) << j;
      }
      if (j != bad) {
        EXPECT_EQ(found.dq[at], clean.dq[at]) << j;
      }
    }
  }
}

// Without the instructions the option changes no bit.
TEST(HostBf16GradientsAnywhere, WithoutTheInstructionsProductsAreOfFp32) {
  HostShape shape = bf16_shape(60, 300);
  const std::uint32_t seed = fresh_seed();
  HostGradients problem = bf16_problem(shape, seed);
  shape.bf16_products = false;
  HostGradients plain = bf16_problem(shape, seed);
  const auto backend = kernels::host_backend(2);
  for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
    if (target & (HWY_AVX3 | HWY_AVX3_DL)) continue;
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    EXPECT_TRUE(problem.run(*backend, one()) == plain.run(*backend, one()));
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

}  // namespace
}  // namespace longspan::tests
