// Products of bf16 by the CPU's own instructions (DTypes::bf16_products): as exact as weights in
// bf16 allow, with each feature and each layout, and the same bits for any ranks, threads and
// neighbours. On a machine without the instructions the option changes no bit, and only that is
// tested.
#include "kernels/host/targets.hpp"
//
#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <algorithm>

#include "kernels/host/bf16_tile.hpp"
#include "kernels/host/packed_keys.hpp"
#include "tests/support/fresh_seed.hpp"
#include "tests/support/host_problem.hpp"
#include "tests/support/sanitized.hpp"

namespace longspan::tests {
namespace {

class HostBf16 : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!kernels::host::has_bf16_products()) GTEST_SKIP() << "no instructions for bf16 products";
  }

  /// Weights rounded to bf16 are off by at most 2^-9 of themselves, and at random by 0.6 * 2^-9; an
  /// lse comes from weights that are not rounded.
  static void expect_right(const HostProblem& problem, const Result& result,
                           const std::vector<float>* sinks = nullptr) {
    const HostProblem::Error error = problem.error(result, sinks);
    EXPECT_LT(error.out, 0x1p-9);
    EXPECT_LT(error.lse, 2e-6);
    EXPECT_LT(error.worst_lse, 1e-5);
  }
  static void expect_rounded_weights(const HostProblem& problem, const Result& result) {
    EXPECT_GT(problem.error(result).out, 1e-5);
  }

  std::unique_ptr<kernels::Backend> backend_ = kernels::host_backend(2);
};

TEST_F(HostBf16, EveryDim) {
  std::vector<int> dims = {1, 15, 21, 59, 203, 511};
  for (int dim = 8; dim <= 512; dim += dim < 136 ? 8 : 88) dims.push_back(dim);
  for (const int dim : dims) {
    SCOPED_TRACE(dim);
    for (const bool causal : {false, true}) {
      HostShape shape = bf16_shape(70, 300, dim);
      shape.mask.causal = causal;
      HostProblem problem(shape, fresh_seed());
      const Result result = problem.run(*backend_);
      expect_right(problem, result);
      expect_rounded_weights(problem, result);
    }
  }
}

TEST_F(HostBf16, EveryLength) {
  for (const std::int32_t queries : {9, 16, 17, 31, 33, 64, 100, 129, 400, 900})
    for (const std::int32_t keys : {1, 31, 128, 129, 517}) {
      SCOPED_TRACE(::testing::Message() << queries << " queries, " << keys << " keys");
      HostShape shape = bf16_shape(queries, std::max(queries, keys), 32);
      shape.mask.causal = (queries + keys) % 2 == 0;
      HostProblem problem(shape, fresh_seed());
      expect_right(problem, problem.run(*backend_));
    }
}

TEST_F(HostBf16, EachFeature) {
  using Change = std::function<void(HostShape&)>;
  const std::vector<std::pair<const char*, Change>> changes{
      {"window", [](HostShape& s) { s.mask = {.causal = true, .window = 50}; }},
      {"both sides", [](HostShape& s) { s.mask = {.window = 40, .right = 9}; }},
      {"softcap", [](HostShape& s) { s.softcap = 5; }},
      {"context ALiBi", [](HostShape& s) { s.alibi = Alibi::context; }},
      {"query ALiBi", [](HostShape& s) { s.alibi = Alibi::query, s.mask.causal = true; }},
      {"qq_bias", [](HostShape& s) { s.qq = true; }},
      {"documents", [](HostShape& s) { s.documents = {0, 5, 130, 131, 290, 400}; }},
      {"scales", [](HostShape& s) { s.scales = s.scales_per_head = true; }},
      {"e4m3 keys", [](HostShape& s) { s.kv_dtype = e4m3, s.scales = true; }},
      {"e5m2 all", [](HostShape& s) { s.kv_dtype = s.q_dtype = e5m2; }},
      {"pages", [](HostShape& s) { s.page = 16; }},
      {"odd pages", [](HostShape& s) { s.page = 7, s.mask.causal = true; }},
      {"x-packed pages", [](HostShape& s) { s.page = 16, s.store = Store::x_packed; }},
      {"groups", [](HostShape& s) { s.heads = 12, s.kv_heads = 1; }},
      {"parts", [](HostShape& s) { s.parts.count = 3; }}};
  for (const auto& [name, change] : changes) {
    SCOPED_TRACE(name);
    HostShape shape = bf16_shape(150, 400);
    change(shape);
    HostProblem problem(shape, fresh_seed());
    expect_right(problem, problem.run(*backend_));
    const std::vector<float> sinks(shape.heads, 0.5f);
    expect_right(problem, problem.run(*backend_, {Shard::contiguous(400, 0, 1)}, &sinks), &sinks);
  }
}

TEST_F(HostBf16, BatchesOfLongAndShortSequences) {
  HostShape shape = bf16_shape(0, 0);
  shape.query_len = {1, 200, 8, 0, 9, 40};
  shape.kv_len = {500, 300, 100, 7, 9, 1000};
  shape.mask.causal = true;
  HostProblem problem(shape, fresh_seed());
  const Result result = problem.run(*backend_);
  expect_right(problem, result);
  // Short sequences keep the products of fp32, whatever is beside them.
  problem.shape.bf16_products = false;
  const Result in_fp32 = problem.run(*backend_);
  const std::int64_t row = std::int64_t{shape.heads} * shape.dim;
  const auto same = [&](std::int64_t first, std::int64_t count) {
    return std::equal(result.out.begin() + first * row, result.out.begin() + (first + count) * row,
                      in_fp32.out.begin() + first * row);
  };
  EXPECT_TRUE(same(0, 1));
  EXPECT_FALSE(same(1, 200));
  EXPECT_TRUE(same(201, 8));
  EXPECT_FALSE(same(209, 9));
}

TEST_F(HostBf16, SameBitsOnEveryNumberOfRanksAndThreads) {
  for (const bool causal : {false, true}) {
    HostShape shape = bf16_shape(217, 3000, 40);
    shape.mask.causal = causal;
    HostProblem problem(shape, fresh_seed());
    for (const Shard& rule : {Shard::contiguous(0, 0, 1), Shard::interleaved(0, 0, 1, 128)}) {
      const Result one = problem.run(*backend_, {rule});
      expect_right(problem, one);
      EXPECT_TRUE(problem.run(*backend_, {rule}).same_bits(one));  // it repeats its bits
      for (const int ranks : {2, 4, 8, 64}) {
        Shard shard = rule;
        shard.ranks = ranks;
        EXPECT_TRUE(problem.run(*backend_, HostProblem::on_all(shard)).same_bits(one)) << ranks;
      }
      for (const int threads : {1, 3, 16})
        EXPECT_TRUE(problem.run(*kernels::host_backend(threads), {rule}).same_bits(one)) << threads;
      // By shares of the rows, which have other neighbours in a tile, and few of them.
      for (const int ranks : {2, 32})
        EXPECT_TRUE(
            problem.run_by_rows(*backend_, {rule}, Shard::striped(0, 0, ranks)).same_bits(one))
            << ranks;
    }
  }
}

// Tiles that share keys which were packed before, in rounds, and tiles that pack for themselves:
// those of few rows, and those of a sequence that is too long.
TEST_F(HostBf16, SameBitsHoweverKeysArePacked) {
  const int dim = 512;
  const kernels::Geometry geometry{.head_dim = dim, .value_dim = dim};
  const std::int64_t most = kernels::host::PackedKeys::kMostBytes /
                            (2 * kernels::host::Bf16Space::segment_elements(geometry)) * kSegment;
  const auto part = [&](double x) {
    return static_cast<std::int32_t>(x * static_cast<double>(most));
  };
  std::vector<std::vector<std::int32_t>> cases{
      {part(0.3), 700, part(0.4), 150}, {part(0.6)}, {part(1.1)}};
  cases.resize(static_cast<std::size_t>(trials(3)));
  for (const std::vector<std::int32_t>& lengths : cases) {
    HostShape shape = bf16_shape(0, 0, dim);
    shape.kv_len = lengths;
    shape.query_len.assign(lengths.size(), 110);
    shape.mask.causal = lengths.size() > 1;
    HostProblem problem(shape, fresh_seed());
    const Shard rule = Shard::contiguous(0, 0, 1);
    const Result ahead = problem.run(*backend_, {rule});
    EXPECT_TRUE(problem.run_by_rows(*backend_, {rule}, Shard::striped(0, 0, 4)).same_bits(ahead))
        << lengths[0];
  }
}

TEST_F(HostBf16, PagesGiveTheBitsOfContiguousKeys) {
  for (const DType kv : {bf16, e4m3}) {
    HostShape shape = bf16_shape(100, 700);
    shape.kv_dtype = kv;
    HostProblem dense(shape, 7);
    shape.page = 16;
    HostProblem paged(shape, 7);
    shape.store = Store::x_packed;
    HostProblem packed(shape, 7);
    const Result result = dense.run(*backend_);
    EXPECT_TRUE(paged.run(*backend_).same_bits(result));
    EXPECT_TRUE(packed.run(*backend_).same_bits(result));
  }
}

TEST_F(HostBf16, ListedInAnyOrder) {
  const ListedKeys keys(fresh_seed());
  for (const bool causal : {false, true}) {
    HostShape shape = bf16_shape(100, 700);
    shape.mask = {.causal = causal, .window = 50};
    HostProblem problem(shape, fresh_seed());
    expect_right(problem, problem.run(*backend_, keys.shards));
  }
}

// Keys that a row does not see may be NaN or infinite, though other rows of its block see them.
TEST_F(HostBf16, KeysOfOtherRowsStayAway) {
  HostShape shape = bf16_shape(128, 128);
  shape.mask.causal = true;
  HostProblem problem(shape, fresh_seed());
  const Result clean = problem.run(*backend_);
  for (const float bad : {kNan, std::numeric_limits<float>::infinity()}) {
    HostProblem spoilt(problem);
    for (const std::int32_t key : {77, 78, 101})
      for (std::int64_t c = 0; c < std::int64_t{shape.kv_heads} * shape.dim; ++c) {
        spoilt.v.set(key * spoilt.kv_stride() + c, bad);
        if (key == 101) spoilt.k.set(key * spoilt.kv_stride() + c, bad);
      }
    const Result result = spoilt.run(*backend_);
    const std::int64_t rows = 77 * std::int64_t{shape.heads};
    EXPECT_TRUE(
        std::equal(clean.out.begin(), clean.out.begin() + rows * shape.dim, result.out.begin()));
    EXPECT_TRUE(std::equal(clean.lse.begin(), clean.lse.begin() + rows, result.lse.begin()));
    EXPECT_FALSE(std::isfinite(result.out[rows * shape.dim]));
  }
}

TEST_F(HostBf16, ScalesOfZeroAndBelow) {
  for (const float scale : {0.0f, -0.3f}) {
    HostProblem problem(bf16_shape(40, 300), fresh_seed());
    problem.shape.scales = true;
    problem.q_scale = {scale * std::sqrt(64.0f)}, problem.k_scale = problem.v_scale = {1};
    expect_right(problem, problem.run(*backend_));
  }
}

class HostBf16Anywhere : public ::testing::Test {
 protected:
  std::unique_ptr<kernels::Backend> backend_ = kernels::host_backend(2);
};

// Without the instructions the option changes no bit.
TEST_F(HostBf16Anywhere, WithoutTheInstructionsProductsAreOfFp32) {
  HostProblem problem(bf16_shape(60, 500), fresh_seed());
  HostProblem plain(problem);
  plain.shape.bf16_products = false;
  for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
    if (target & (HWY_AVX3 | HWY_AVX3_DL)) continue;
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    EXPECT_FALSE(kernels::host::has_bf16_products());
    EXPECT_EQ(kernels::host_bf16_products(false), "in fp32");
    EXPECT_TRUE(problem.run(*backend_).same_bits(plain.run(*backend_)));
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

TEST_F(HostBf16Anywhere, OtherTypesKeepTheirProducts) {
  for (const DType dtype : {fp32, fp16}) {
    HostShape shape = bf16_shape(60, 500);
    shape.dtype = dtype;
    HostProblem problem(shape, fresh_seed());
    EXPECT_LT(problem.error(problem.run(*backend_)).out, 2e-6);
  }
}

}  // namespace
}  // namespace longspan::tests
