// Decode context parallelism, the peers' grid: the assertions of their tests of transports and of
// the merge, with ranks simulated on one device (tests/dist/serving_test.cpp has real ones).
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "tests/support/grids.hpp"

namespace longspan::tests {

/// Keys on a rank when tokens are dealt in turns of `block`: the formula of serving engines.
inline std::int64_t engines_local_len(std::int64_t length, std::int64_t ranks, std::int64_t rank,
                                      std::int64_t block) {
  const std::int64_t round = ranks * block, rest = length % round - rank * block;
  return length / round * block + (rest < 0 ? 0 : rest < block ? rest : block);
}

inline std::vector<Shard> dealt(const ServingProblem& problem, int ranks, std::int64_t block) {
  std::vector<Shard> shards;
  for (int r = 0; r < ranks; ++r)
    shards.push_back(Shard::interleaved(problem.shape.kv_lens[0], r, ranks, block));
  return shards;
}

struct ContextParallelCase {
  Serving shape;
  int ranks = 4;
  std::int64_t block = 1;
};

inline std::vector<ContextParallelCase> context_parallel_grid() {
  std::vector<ContextParallelCase> cases;
  for (DType dtype : {DType::fp16, DType::bf16, DType::fp32})
    for (std::int64_t block : {1, 16, 64}) {
      // World 4, seven sequences, two heads a rank, head size 32.
      Serving s{.heads = 8, .kv_heads = 1, .dim = 32, .dtype = dtype};
      s.q_lens.assign(7, 1);
      s.kv_lens = {1, 2, 3, 65, 200, 129, 1000};
      cases.push_back({s, 4, block});
      // Sequences of 0 and 2 keys, queries [0, 1) and [1, 5).
      s.q_lens = {1, 4};
      s.kv_lens = {0, 2};
      cases.push_back({s, 4, block});
      s.sinks = true;
      cases.push_back({s, 4, block});
    }
  for (int ranks : {2, 4})
    for (std::int64_t tokens : {1, 17, 128})
      for (std::int64_t block : {1, 16, 64}) {
        // Queries of 1, 3, 2, 1, 3, 2 ... rows. Some sequences are empty on every rank, some on all
        // ranks but one, some full.
        Serving s{.heads = 6 * ranks, .kv_heads = 1, .dim = 256, .dtype = DType::bf16};
        s.q_lens.clear();
        s.kv_lens.clear();
        for (std::int64_t t = 0; t < tokens;) {
          const std::int64_t next = std::int64_t{1} + (s.q_lens.size() % 3 == 1 ? 2 : 0) +
                                    (s.q_lens.size() % 3 == 2 ? 1 : 0);
          const auto q_len = static_cast<std::int32_t>(std::min(next, tokens - t));
          const std::int32_t lengths[] = {517, 3, 0, 64, 255};
          s.q_lens.push_back(q_len);
          s.kv_lens.push_back(lengths[s.q_lens.size() % 5]);
          t += q_len;
        }
        s.page = 64;
        cases.push_back({s, ranks, block});
      }
  return cases;
}

inline void run_context_parallel(const kernels::Backend& backend, const ContextParallelCase& c,
                                 std::uint64_t seed) {
  const ServingProblem problem(c.shape, seed);
  SCOPED_TRACE(describe(c.shape) + " ranks " + std::to_string(c.ranks) + " block " +
               std::to_string(c.block));
  for (const std::int64_t length : c.shape.kv_lens)
    for (int r = 0; r < c.ranks; ++r)
      EXPECT_EQ(Shard::interleaved(length, r, c.ranks, c.block).local_len(length),
                engines_local_len(length, c.ranks, r, c.block));
  Tolerance tolerance{3e-2, 0, 1e-4};
  if (c.shape.dtype == DType::fp32) tolerance = {1e-5, 0, 1e-4};
  const std::vector<Shard> shards = dealt(problem, c.ranks, c.block);
  const ServingResult first = run_ranks(backend, problem, shards);
  expect_right(problem, first, tolerance, 0);
  const ServingResult again = run_ranks(backend, problem, shards);
  EXPECT_TRUE(first.out == again.out) << "other bits in the second run";
}

/// One row of `correct_attn_out`'s mathematics: parts with lse of a base, merged.
struct PartsCase {
  const char* name;
  std::vector<float> lses;  // of the parts, natural units; the same for every row
  std::vector<float> fill;  // payload of a part instead of random values; 0: random
};

inline std::vector<PartsCase> parts_cases() {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::nanf("");
  return {{"equal lse", {1.5f, 1.5f, 1.5f, 1.5f}, {0, 0, 0, 0}},
          {"one dominates", {0, -100, -100, -100}, {0, 0, 0, 0}},
          {"far below -90", {-300, -301, -299, -302}, {0, 0, 0, 0}},
          {"an empty part carries NaN", {0.5f, -inf, 1, -2}, {0, nan, 0, 0}},
          {"an empty part carries infinity", {0.5f, inf, 1, -2}, {0, inf, 0, 0}},
          {"all parts are empty", {-inf, inf, -inf, inf}, {nan, nan, inf, -inf}},
          {"a NaN lse is empty", {0.5f, nan, 1, -2}, {0, nan, 0, 0}}};
}

/// merge_states of 4 parts [tokens, heads, dim] with padded strides, both bases, all dtypes.
inline void run_parts(const ServingOps& kernels, Device device, const PartsCase& c, DType dtype,
                      LogBase base, std::uint64_t seed) {
  SCOPED_TRACE(std::string(c.name) + " " + name(dtype) +
               (base == LogBase::e ? " base e" : " base 2"));
  constexpr int kParts = 4, kTokens = 5, kHeads = 2, kDim = 32;
  std::mt19937 random(static_cast<unsigned>(seed));
  std::normal_distribution<float> normal;
  const std::size_t rows = std::size_t{kTokens} * kHeads;
  std::vector<std::byte> parts(kParts * rows * kDim * size_of(dtype));
  std::vector<float> lses(kParts * rows);
  for (int p = 0; p < kParts; ++p)
    for (std::size_t r = 0; r < rows; ++r) {
      lses[p * rows + r] = base == LogBase::e ? c.lses[p] : c.lses[p] * kLog2E;
      for (int d = 0; d < kDim; ++d) {
        const float fill = c.fill[p];
        launcher::store(parts.data(), dtype, (static_cast<std::int64_t>(p * rows + r)) * kDim + d,
                        fill == 0 ? normal(random) : fill);
      }
    }
  const Buffer in = on_device(device, parts), in_lse = on_device(device, lses),
               out = poisoned(device, rows * kDim * size_of(dtype)),
               lse = poisoned(device, rows * sizeof(float));
  MergeStates m;
  m.out = Tensor(out.data(), dtype, {kTokens, kHeads, kDim}, device);
  m.out_lse = Lse::tokens_heads(Tensor(lse.data(), DType::fp32, {kTokens, kHeads}, device));
  m.parts = Tensor(in.data(), dtype, {kParts, kTokens, kHeads, kDim}, device);
  m.lses = Lse::tokens_heads(Tensor(in_lse.data(), DType::fp32, {kParts, kTokens, kHeads}, device));
  m.nan_is_empty = true;
  kernels.merge_states(m, base);
  const std::vector<std::byte> merged = on_host(out, rows * kDim * size_of(dtype));
  const std::vector<float> merged_lse = on_host<float>(lse, rows);

  double top = -HUGE_VAL, sum = 0;
  const auto counts = [&](int p) { return std::isfinite(c.lses[p]); };
  for (int p = 0; p < kParts; ++p)
    if (counts(p)) top = std::max(top, static_cast<double>(c.lses[p]));
  for (int p = 0; p < kParts; ++p)
    if (counts(p)) sum += std::exp(c.lses[p] - top);
  const double unit = base == LogBase::e ? 1.0 : static_cast<double>(kLog2E);
  for (std::size_t r = 0; r < rows; ++r) {
    if (sum == 0) {
      EXPECT_EQ(merged_lse[r], -std::numeric_limits<float>::infinity());
    } else {
      EXPECT_NEAR(merged_lse[r], (top + std::log(sum)) * unit, 1e-4);
    }
    for (int d = 0; d < kDim; ++d) {
      double exact = 0;
      for (int p = 0; p < kParts; ++p)
        if (counts(p))
          exact += std::exp(c.lses[p] - top) / sum *
                   launcher::load(parts.data(), dtype,
                                  (static_cast<std::int64_t>(p * rows + r)) * kDim + d);
      const double found =
          launcher::load(merged.data(), dtype, static_cast<std::int64_t>(r) * kDim + d);
      ASSERT_NEAR(found, exact, sum == 0 ? 0.0 : dtype == DType::fp32 ? 1e-5 : 3e-2);
    }
  }
}

}  // namespace longspan::tests
