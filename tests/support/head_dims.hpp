// Heads of unusual sizes: values of another width than keys, the smallest and the widest heads, and
// values that are the first columns of the keys (MLA). On every device, by every call. A file that
// includes this first defines kDevice, backend() and LONGSPAN_NEEDS_DEVICE().
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "longspan/limits.hpp"
#include "tests/support/context_parallel.hpp"
#include "tests/support/fresh_seed.hpp"

namespace longspan::tests {
namespace {

constexpr std::pair<int, int> kHeadDims[] = {
    {192, 128},                   // MLA, as in prefill
    {kMaxHeadDim, kMaxValueDim},  // MLA, as in decode
    {64, 40},
    {40, 136},
    {1, 1},  // the least
    {8, 512},
    {15, 21},  // no multiples of 8
    {203, 59},
    {59, 59},
    {575, 511},
    {264, 264},
    {512, 512},
};

Serving of_dims(int dim, int value_dim, DType dtype) {
  Serving s{.heads = 4, .kv_heads = 2, .dim = dim, .value_dim = value_dim, .dtype = dtype};
  s.q_lens = {1, 3, 40};
  s.kv_lens = {190, 70, 150};
  return s;
}

/// All results of `run` against float64.
template <class Run>
void expect_exact(const Serving& shape, const Run& run) {
  const unsigned seed = fresh_seed();
  SCOPED_TRACE(describe(shape) + " seed " + std::to_string(seed));
  const ServingProblem problem(shape, seed);
  expect_right(problem, run(problem), problem.tolerance(), 0);
}

ServingResult over_pages(const ServingProblem& problem) {
  return run_segmented(ServingOps(kDevice), kDevice, problem);
}

TEST(HeadDims, AttentionOverPages) {
  LONGSPAN_NEEDS_DEVICE();
  for (const auto& [dim, value_dim] : kHeadDims)
    for (DType dtype : {DType::fp32, DType::bf16, DType::fp16})
      expect_exact(of_dims(dim, value_dim, dtype), over_pages);
}

TEST(HeadDims, QuantisedAndPackedPages) {
  LONGSPAN_NEEDS_DEVICE();
  for (const auto& [dim, value_dim] : kHeadDims) {
    Serving fp8 = of_dims(dim, value_dim, DType::fp16);
    fp8.kv_dtype = DType::e4m3;
    fp8.per_head_scales = true;
    fp8.alibi = Alibi::context;
    fp8.sinks = true;
    expect_exact(fp8, over_pages);
    Serving packed = of_dims(dim, value_dim, DType::bf16);
    packed.x_packed = true;
    packed.softcap = 20;
    packed.mask.window = 60;
    expect_exact(packed, over_pages);
  }
}

TEST(HeadDims, Tf32) {
  LONGSPAN_NEEDS_DEVICE();
  for (const auto& [dim, value_dim] : kHeadDims) {
    const Serving shape = of_dims(dim, value_dim, DType::fp32);
    const unsigned seed = fresh_seed();
    SCOPED_TRACE(describe(shape) + " seed " + std::to_string(seed));
    const ServingProblem problem(shape, seed);
    const ServingResult result =
        run_segmented(ServingOps(kDevice), kDevice, problem, {.tf32 = true});
    expect_right(problem, result, {.absolute = 4e-3, .lse = 2e-3}, 0);  // 11 bits, as fp16 has
  }
}

TEST(HeadDims, SegmentsHandedOut) {
  LONGSPAN_NEEDS_DEVICE();
  for (const auto& [dim, value_dim] : kHeadDims) {
    Serving shape = of_dims(dim, value_dim, DType::bf16);
    shape.q_lens = {1, 2};
    shape.kv_lens = {190, 70};
    expect_exact(shape, [](const ServingProblem& problem) {
      return run_segmented(ServingOps(kDevice), kDevice, problem, {.segments = 5});
    });
  }
}

TEST(HeadDims, ChunkedPrefill) {
  LONGSPAN_NEEDS_DEVICE();
  for (const auto& [dim, value_dim] : kHeadDims)
    for (DType dtype : {DType::fp32, DType::bf16}) {
      Serving shape = of_dims(dim, value_dim, dtype);
      shape.separate_new = true;
      expect_exact(shape, [](const ServingProblem& problem) {
        return run_context(ServingOps(kDevice), kDevice, problem);
      });
    }
}

TEST(HeadDims, StatesOfRanks) {
  LONGSPAN_NEEDS_DEVICE();
  for (const auto& [dim, value_dim] : kHeadDims)
    for (DType dtype : {DType::fp32, DType::fp16})
      expect_exact(of_dims(dim, value_dim, dtype), [](const ServingProblem& problem) {
        return run_ranks(backend(), problem, dealt(problem, 3, 16));
      });
}

/// Also without such an option, with their keys split.
TEST(HeadDims, ShortQueriesKeepTheFixedOrder) {
  LONGSPAN_NEEDS_DEVICE();
  for (const auto& [dim, value_dim] : kHeadDims) {
    Serving shape = of_dims(dim, value_dim, DType::bf16);
    shape.q_lens = {1, 3};
    shape.kv_lens = {900, 70};
    const unsigned seed = fresh_seed();
    SCOPED_TRACE(describe(shape) + " seed " + std::to_string(seed));
    const ServingProblem problem(shape, seed);
    const std::vector<Shard> halves{Shard::contiguous(900, 0, 2), Shard::contiguous(900, 1, 2)};
    const ServingResult any = over_pages(problem), fixed = run_ranks(backend(), problem, halves);
    EXPECT_TRUE(any.out == fixed.out);
    EXPECT_TRUE(any.lse == fixed.lse);
  }
}

TEST(HeadDims, ValuesThatAreTheFirstColumnsOfTheKeys) {
  LONGSPAN_NEEDS_DEVICE();
  for (const auto& [dim, value_dim] : {std::pair{576, 512}, {96, 64}, {64, 64}, {203, 59}})
    for (DType dtype : {DType::fp32, DType::bf16}) {
      Serving shape = of_dims(dim, value_dim, dtype);
      shape.heads = 16;
      shape.kv_heads = 1;
      shape.q_lens = {1, 2, 9};
      shape.values_in_keys = true;
      expect_exact(shape, over_pages);
      shape.kv_dtype = DType::e4m3;
      expect_exact(shape, over_pages);
    }
}

}  // namespace
}  // namespace longspan::tests
