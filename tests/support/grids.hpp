// The acceptance grids of serving kernels, with float64 in place of another kernel: segmented
// attention over a paged cache, and chunked prefill. One source for the host and for GPUs: a test
// file chooses the device, and the number of cases.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "tests/support/serving_run.hpp"

namespace longspan::tests {

/// On the host a grid is thinned to every `every`-th case; LONGSPAN_FULL_GRID=1 runs all.
inline std::size_t step_of_grid(Device device, std::size_t every) {
  const char* full = std::getenv("LONGSPAN_FULL_GRID");
  const bool all = device == Device::cuda || (full != nullptr && full[0] == '1');
  return all ? 1 : every;
}

inline void expect_right(const ServingProblem& problem, const ServingResult& result,
                         const Tolerance& tolerance, std::int64_t sampled) {
  const Verdict verdict =
      judge(problem, result.out, result.lse, problem.all_rows(), tolerance, sampled);
  EXPECT_TRUE(verdict.right()) << verdict.wrong << " of " << verdict.compared
                               << " are wrong: " << verdict.first << " (worst " << verdict.worst
                               << ", lse " << verdict.worst_lse << ")";
}

/// Runs every `every`-th of the cases, a fixed choice.
template <class Case, class Run>
void run_grid(Device device, const std::vector<Case>& cases, std::size_t every, const Run& run) {
  const std::size_t step = step_of_grid(device, every);
  for (std::size_t i = 0; i < cases.size(); i += step) {
    if (device == Device::cuda && is_left_out(3 * work_of(cases[i].shape))) continue;
    SCOPED_TRACE("case " + std::to_string(i) + " of " + std::to_string(cases.size()));
    run(cases[i], 1000 + i);
    if (::testing::Test::HasFailure()) break;  // one is enough to read
  }
}

// ---------------------------------------------------------------- unified (segmented) attention

struct UnifiedCase {
  Serving shape;
  int segments = 0;  // 0: as many as fill the device; else returned and reduced
};

/// Heads, head sizes, block counts, lengths, windows, softcaps, fp8 queries with scales, and the
/// path with segments, as in the peers' own test.
inline std::vector<UnifiedCase> unified_grid() {
  std::vector<UnifiedCase> cases;
  const std::pair<int, int> heads[] = {{4, 4}, {8, 2}, {5, 1}};
  const std::vector<std::int32_t> q_lens[] = {{1, 5, 129}, {1, 1, 1}};
  const std::vector<std::int32_t> kv_lens[] = {{1328, 18, 463}, {523, 37, 2011}};
  for (const auto& [q_heads, kv_heads] : heads)
    for (int dim : {128, 256})
      for (bool fp8_q : {false, true})
        for (int lens : {0, 1})
          for (std::int64_t window : {0, 64, 128, 256})
            for (float softcap : {0.0f, 50.0f})
              for (int segments : {0, 16}) {
                Serving s{.heads = q_heads, .kv_heads = kv_heads, .dim = dim};
                s.dtype = DType::bf16;
                if (fp8_q) s.q_dtype = s.kv_dtype = DType::e4m3;
                s.q_lens = q_lens[lens];
                s.kv_lens = kv_lens[lens];
                s.mask = {.causal = true, .window = window};
                s.softcap = softcap;
                s.pool = 512;
                cases.push_back({s, segments});
              }
  return cases;
}

inline Tolerance unified_tolerance(const Serving& s) {
  if (is_fp8(s.of_out())) return {2e-1, 2e-1};
  if (is_fp8(s.of_kv())) return {1.5e-1, 1.5e-1};
  return {1.5e-2, 1e-2};
}

inline void run_unified(const ServingOps& kernels, Device device, const UnifiedCase& c,
                        std::uint64_t seed) {
  const ServingProblem problem(c.shape, seed);
  SCOPED_TRACE(describe(c.shape) + " segments " + std::to_string(c.segments));
  expect_right(problem, run_segmented(kernels, device, problem, {.segments = c.segments}),
               unified_tolerance(c.shape), 8);
}

/// Beside the main grid: fp8 caches under 16-bit queries, fp8 output over many sequences, all
/// options of the seeds' kernel at once, and segments of a fixed size.
inline std::vector<UnifiedCase> unified_extras() {
  std::vector<UnifiedCase> cases;
  for (int dim : {96, 128, 256}) {
    Serving s{.heads = 8, .kv_heads = 2, .dim = dim, .dtype = DType::bf16};
    s.q_lens = {1, 5, 129};
    s.kv_lens = {1328, 18, 463};
    for (DType kv : {DType::e4m3, DType::e5m2}) {
      s.kv_dtype = kv;
      s.per_head_scales = kv == DType::e5m2;
      cases.push_back({s, 0});
      cases.push_back({s, 16});
    }
  }
  for (const std::int32_t length : {1, 533}) {
    Serving s{.heads = 8, .kv_heads = 2, .dim = 128, .dtype = DType::fp16};
    s.out_dtype = DType::e4m3;
    s.out_scale = 0.5f;
    s.q_lens.assign(length == 1 ? 533 : 8, length);
    s.kv_lens = s.q_lens;
    cases.push_back({s, 0});
  }
  for (const Alibi alibi : {Alibi::context, Alibi::query, Alibi::sqrt}) {
    Serving s{.heads = 8, .kv_heads = 2, .dim = 128, .dtype = DType::bf16};
    s.q_lens = {1, 5, 33};
    s.kv_lens = {1328, 18, 463};
    s.mask.window = 300;
    s.causal = {1, 0, 1};
    s.softcap = 20.0f;
    s.alibi = alibi;
    s.slopes_of_sequences = alibi == Alibi::sqrt;
    s.qq_bias = s.sinks = true;
    s.small_dtype = DType::bf16;
    for (int segments : {0, 3, 16, 40}) cases.push_back({s, segments});
    s.kv_dtype = DType::e4m3;
    s.x_packed = true;
    cases.push_back({s, 0});
  }
  for (int heads : {1, 5, 7, 64}) {
    Serving s{.heads = heads, .kv_heads = 1, .dim = 80, .dtype = DType::fp16};
    s.q_lens = {1, 4};
    s.kv_lens = {700, 90};
    cases.push_back({s, 0});
    cases.push_back({s, 16});
  }
  return cases;
}

// ------------------------------------------------------------------------------ chunked prefill

struct PrefixCase {
  Serving shape;
  Tolerance tolerance;
};

/// 64 heads, groups of 1 and 64, head sizes 24 and 128, x-packed pages of 32 (and 544) keys, fp8
/// variants, windows or ALiBi, ten sequences of random lengths of which the last one decodes.
/// Inputs of +-1e-3 under the peers' tolerance, where the answer is nearly the mean of the values,
/// and of order 1 under ours.
inline std::vector<PrefixCase> prefix_grid(std::int32_t longest, int heads = 64) {
  std::vector<PrefixCase> cases;
  std::mt19937 random(7);
  for (bool alibi : {false, true})
    for (bool small : {true, false})
      for (int kv_heads : {heads, 1})
        for (int dim : {24, 128})
          for (std::int64_t window : {0, 16, 2048}) {
            if (alibi && window != 0) continue;
            for (std::optional<DType> kv :
                 {std::optional<DType>(), std::optional<DType>(DType::e4m3),
                  std::optional<DType>(DType::e5m2)})
              for (bool skip : {false, true}) {
                Serving s{.heads = heads, .kv_heads = kv_heads, .dim = dim, .dtype = DType::fp16};
                s.kv_dtype = kv;
                s.q_lens.clear();
                s.kv_lens.clear();
                for (int b = 0; b < 10; ++b) {
                  const auto length = [&] {
                    return static_cast<std::int32_t>(16 + random() % (longest - 15));
                  };
                  s.q_lens.push_back(b == 9 ? 1 : length());
                  s.kv_lens.push_back(s.q_lens.back() + length());
                }
                s.mask.window = window;
                if (alibi) s.alibi = Alibi::context;
                s.page = cases.size() % 5 == 0 ? 544 : 32;
                s.x_packed = s.separate_new = true;
                s.skip_decode = skip;
                if (small) s.magnitude = 1e-3f / 3.4642f;
                Tolerance tolerance{4e-3};
                if (small) tolerance = {kv ? 1e-3 : alibi ? 1e-6 : 1e-4};
                cases.push_back({s, tolerance});
              }
          }
  return cases;
}

inline void run_prefix(const ServingOps& kernels, Device device, const PrefixCase& c,
                       std::uint64_t seed) {
  const ServingProblem problem(c.shape, seed);
  SCOPED_TRACE(describe(c.shape));
  expect_right(problem, run_context(kernels, device, problem), c.tolerance, 4);
}

/// Sinks, fp8 output, per-sequence causal flags, qq_bias and rows of pages for chunked prefill.
inline std::vector<PrefixCase> prefix_extras() {
  std::vector<PrefixCase> cases;
  for (DType dtype : {DType::bf16, DType::fp16, DType::fp32}) {
    Serving s{.heads = 8, .kv_heads = 2, .dim = 96, .dtype = dtype};
    s.q_lens = {65, 1, 130, 4, 0};
    s.kv_lens = {200, 600, 130, 90, 40};
    s.separate_new = s.sinks = s.qq_bias = true;
    s.causal = {1, 1, 0, 1, 1};
    s.mask.window = 100;
    s.softcap = 10;
    const Tolerance usual{dtype == DType::fp32 ? 5e-6 : dtype == DType::fp16 ? 4e-3 : 3e-2};
    cases.push_back({s, usual});
    s.kv_dtype = DType::e4m3;
    s.per_head_scales = true;
    cases.push_back({s, usual});
    s.alibi = Alibi::query;
    s.out_dtype = DType::e4m3;
    s.out_scale = 0.02f;
    cases.push_back({s, usual});
  }
  return cases;
}

}  // namespace longspan::tests
