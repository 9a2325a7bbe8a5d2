// Defects of kernels that others ship, each as a test with the defect's name. One source for the
// host and for GPUs: the file that includes it defines kDevice, backend() and
// LONGSPAN_NEEDS_DEVICE().
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "tests/support/context_parallel.hpp"

namespace longspan::tests {
namespace {

/// Sets every element of an array of `dtype`.
inline void set_all(std::vector<std::byte>& values, DType dtype, float value) {
  for (std::size_t i = 0; i < values.size() / size_of(dtype); ++i)
    launcher::store(values.data(), dtype, static_cast<std::int64_t>(i), value);
}

/// All scores of the problem become `score`, up to `spread` of their size.
inline void set_scores(ServingProblem& problem, double score) {
  const Serving& s = problem.shape;
  const auto root = static_cast<float>(std::sqrt(std::abs(score) / s.dim / s.scale_used()));
  set_all(problem.q, s.of_q(), root);
  set_all(problem.k, s.of_kv(), score < 0 ? -root : root);
  set_all(problem.raw_k, s.dtype, score < 0 ? -root : root);
}

inline void expect_exact(const ServingProblem& problem, const ServingResult& result,
                         Tolerance tolerance) {
  expect_right(problem, result, tolerance, 0);
}

TEST(Defects, ASegmentEmptiedByTheWindowReportsMinusInfinity) {
  LONGSPAN_NEEDS_DEVICE();
  // With a max of 0, the merge would lose a row whose true scores are below about -90.
  Serving s{.heads = 4, .kv_heads = 2, .dim = 64, .q_lens = {1, 1}, .kv_lens = {512, 300}};
  s.mask.window = 100;
  ServingProblem problem(s, 21);
  set_scores(problem, -200);
  HandedOut found;
  const ServingResult reduced = run_segmented(ServingOps(kDevice), kDevice, problem,
                                              {.segments = 8, .keys = 64, .to = &found});
  for (std::size_t row = 0; row < 8; ++row)
    for (int segment = 0; segment < 3; ++segment) {  // keys 0 to 191: out of both windows
      EXPECT_EQ(found.max[row * 8 + segment], -std::numeric_limits<float>::infinity());
      EXPECT_EQ(found.expsum[row * 8 + segment], 0.0f);
    }
  expect_exact(problem, reduced, {1e-5});
  expect_exact(problem, run_ranks(backend(), problem, dealt(problem, 4, 16)), {1e-5});
}

TEST(Defects, ScoresFarBelowAnyFiniteStandInForMinusInfinity) {
  LONGSPAN_NEEDS_DEVICE();
  // Hidden keys with a score of -10000 would outweigh visible ones at -32768.
  for (DType dtype : {DType::fp32, DType::bf16})
    for (std::int64_t window : {0, 40}) {
      Serving s{.heads = 4, .kv_heads = 2, .dim = 64, .dtype = dtype};
      s.q_lens = {3, 40};
      s.kv_lens = {200, 333};
      s.mask.window = window;
      ServingProblem problem(s, 22);
      set_scores(problem, -32768);  // q = 64, k = -64: exact in every dtype
      const Tolerance tolerance{dtype == DType::fp32 ? 1e-5 : 3e-2};
      expect_exact(problem, run_segmented(ServingOps(kDevice), kDevice, problem), tolerance);
      expect_exact(problem, run_segmented(ServingOps(kDevice), kDevice, problem, {.segments = 4}),
                   tolerance);
      expect_exact(problem, run_ranks(backend(), problem, dealt(problem, 4, 1)), tolerance);
    }
}

TEST(Defects, KeysHiddenByBiasAloneAreNotSeen) {
  LONGSPAN_NEEDS_DEVICE();
  // Only drafts, so that some rows see no key in parts of the keys.
  Serving s{.heads = 4, .kv_heads = 2, .dim = 64, .q_lens = {40, 9}, .kv_lens = {40, 9}};
  s.qq_bias = true;
  const ServingProblem problem(s, 23);
  for (int segments : {0, 3, 16})
    expect_exact(problem,
                 run_segmented(ServingOps(kDevice), kDevice, problem, {.segments = segments}),
                 {5e-6});
}

TEST(Defects, ASinkCountsOnceOverAllRanksAndSegments) {
  LONGSPAN_NEEDS_DEVICE();
  Serving s{.heads = 4, .kv_heads = 2, .dim = 64, .q_lens = {1, 6}, .kv_lens = {300, 77}};
  s.sinks = true;
  ServingProblem problem(s, 24);
  set_all(problem.sinks, s.small_dtype, 6.0f);  // as much weight as some 400 keys
  for (int ranks : {1, 2, 4})
    expect_exact(problem, run_ranks(backend(), problem, dealt(problem, ranks, 16)), {5e-6});
  for (int segments : {0, 1, 7, 16})
    expect_exact(problem,
                 run_segmented(ServingOps(kDevice), kDevice, problem, {.segments = segments}),
                 {5e-6});
}

TEST(Defects, SegmentsPastTheEndAreNeitherWrittenNorRead) {
  LONGSPAN_NEEDS_DEVICE();
  const ServingProblem problem(
      {.heads = 4, .kv_heads = 2, .dim = 64, .q_lens = {1, 1}, .kv_lens = {100, 30}}, 25);
  HandedOut found;  // 4 segments and 1; the others stay NaN
  const ServingResult reduced = run_segmented(ServingOps(kDevice), kDevice, problem,
                                              {.segments = 8, .keys = 32, .to = &found});
  for (int row = 0; row < 8; ++row)
    for (int segment = 0; segment < 8; ++segment) {
      const bool has_keys = segment < (row < 4 ? 4 : 1);
      EXPECT_EQ(std::isnan(found.max[row * 8 + segment]), !has_keys) << row << " " << segment;
      EXPECT_EQ(std::isnan(found.expsum[row * 8 + segment]), !has_keys);
      EXPECT_EQ(std::isnan(found.output[(row * 8 + segment) * 64]), !has_keys);
    }
  expect_exact(problem, reduced, {5e-6});
}

TEST(Defects, SoftcapFarAboveItsCapDoesNotOverflow) {
  LONGSPAN_NEEDS_DEVICE();
  // |score / cap| of some hundreds: exp(2 x) is infinite, and a quotient of it NaN.
  for (DType dtype : {DType::fp32, DType::fp16, DType::bf16})
    for (float cap : {0.5f, 30.0f}) {
      Serving s{.heads = 4, .kv_heads = 2, .dim = 64, .dtype = dtype};
      s.q_lens = {1, 20};
      s.kv_lens = {200, 300};
      s.softcap = cap;
      s.scale = 40;
      const ServingProblem problem(s, 26);
      Tolerance tolerance = problem.tolerance();
      tolerance.lse = 2e-5;
      expect_exact(problem, run_segmented(ServingOps(kDevice), kDevice, problem), tolerance);
      expect_exact(problem, run_ranks(backend(), problem, dealt(problem, 2, 16)), tolerance);
    }
}

TEST(Defects, StaleNaNInPagesOutsideTheWindowStaysThere) {
  LONGSPAN_NEEDS_DEVICE();
  // The problem leaves NaN in all keys that no row sees, and garbage in their table entries.
  for (DType dtype : {DType::fp32, DType::bf16})
    for (int page : {1, 16, 128})
      for (std::int64_t window : {1, 10, 129}) {
        Serving s{.heads = 4, .kv_heads = 2, .dim = 64, .dtype = dtype};
        s.q_lens = {1, 5, 70};
        s.kv_lens = {700, 333, 257};
        s.mask.window = window;
        s.page = page;
        if (kDevice == Device::cuda && is_left_out(3 * work_of(s))) continue;
        const ServingProblem problem(s, 27);
        const Tolerance tolerance = problem.tolerance();
        expect_exact(problem, run_segmented(ServingOps(kDevice), kDevice, problem), tolerance);
        expect_exact(problem, run_segmented(ServingOps(kDevice), kDevice, problem, {.segments = 5}),
                     tolerance);
        expect_exact(problem, run_ranks(backend(), problem, dealt(problem, 4, 16)), tolerance);
      }
}

TEST(Defects, PayloadsOfEmptyShardsAreNotRead) {
  LONGSPAN_NEEDS_DEVICE();
  // Fewer keys than ranks; the slots of states are NaN beforehand.
  for (DType dtype : {DType::fp32, DType::bf16}) {
    Serving s{.heads = 4, .kv_heads = 2, .dim = 64, .dtype = dtype};
    s.q_lens = {1, 4, 1, 2};
    s.kv_lens = {1, 2, 0, 3};
    s.page = 1;
    const ServingProblem problem(s, 28);
    expect_exact(problem, run_ranks(backend(), problem, dealt(problem, 4, 1)), problem.tolerance());
  }
  for (const PartsCase& c : parts_cases())
    run_parts(ServingOps(kDevice), kDevice, c, DType::fp32, LogBase::e, 29);
}

TEST(Defects, OffsetsArePast32Bits) {
  // 2^31 elements and more, from each factor in turn.
  const std::int64_t big = (std::int64_t{1} << 31) + 123;
  const kernels::Rows rows{nullptr, 70000, 128};
  EXPECT_EQ(reinterpret_cast<std::intptr_t>(rows.at<char>(100000, 3)), 70000LL * 100000 + 3 * 128);
  kernels::KvRows cache(nullptr, 1024, 128);
  cache.page_stride = 16 * 1024;
  cache.chunk_stride = big;
  EXPECT_EQ(cache.column(17), 2 * big + 1);
  EXPECT_EQ(reinterpret_cast<std::intptr_t>(cache.at<char>(300000 * 16LL, 7)),
            300000LL * 16 * 1024 + 7 * 128);
  kernels::StateSlots states{nullptr, std::int64_t{1} << 27, 128, 3};
  EXPECT_GT(states.slot_bytes(), std::int64_t{1} << 36);
  EXPECT_EQ(reinterpret_cast<std::intptr_t>(states.o(2, 5)),
            2 * states.slot_bytes() + kernels::StateSlots::stats_bytes(states.rows) + 5 * 128 * 4);
  const Shard shard = Shard::interleaved(big, 3, 4, 16);
  EXPECT_EQ(shard.position(shard.local_len(big) - 1, big) < big, true);
  EXPECT_EQ(shard.before(big, big), shard.local_len(big));
}

/// A cache of more than 2^31 elements, of which the last pages are used: `upload` writes part of
/// it, the rest stays as it was.
template <class Upload>
void check_large_cache(DType kv_dtype, bool x_packed, const Upload& upload) {
  Serving s{.heads = 8, .kv_heads = 2, .dim = 128, .dtype = DType::bf16};
  s.kv_dtype = kv_dtype;
  s.q_lens = {1, 5};
  s.kv_lens = {120, 77};
  s.x_packed = x_packed;
  const ServingProblem problem(s, 30);
  ServingArrays arrays(kDevice, problem, Shard::contiguous(0, 0, 1));
  const std::int64_t stride = problem.page_stride(false), used = arrays.cache.pages;
  const std::int64_t first = (std::int64_t{1} << 31) / stride + 2;
  const auto bytes = static_cast<std::int64_t>(size_of(kv_dtype));
  const auto small = [&](const Buffer& from) { return on_host(from, used * stride * bytes); };
  const std::vector<std::byte> k = small(arrays.k), v = small(arrays.v);
  arrays.k = Buffer(kDevice, (first + used) * stride * bytes);
  arrays.v = Buffer(kDevice, (first + used) * stride * bytes);
  upload(static_cast<std::byte*>(arrays.k.data()) + first * stride * bytes, k);
  upload(static_cast<std::byte*>(arrays.v.data()) + first * stride * bytes, v);
  for (std::int32_t& entry : arrays.cache.table)
    if (entry >= 0 && entry < used) entry += static_cast<std::int32_t>(first);
  arrays.cache.pages += first;
  arrays.table = on_device(kDevice, arrays.cache.table);
  const ServingOps kernels(kDevice);
  SegmentedAttention a;
  arrays.paged(a.attention);
  const Buffer workspace = poisoned(kDevice, kernels.workspace_bytes(a));
  a.attention.workspace = {workspace.data(), workspace.bytes()};
  kernels.check(a);
  kernels.segmented_attention(a);
  settle(arrays.out);
  expect_exact(problem, arrays.result(), problem.tolerance());
}

}  // namespace
}  // namespace longspan::tests
