// State in on the host: keys in a chain of calls that share a slot, each beginning from the state
// of those before, against float64 and against as many slots and a merge.
#include <gtest/gtest.h>

#include <random>
#include <string>

#include "tests/support/fresh_seed.hpp"
#include "tests/support/host_problem.hpp"

namespace longspan::tests {
namespace {

class HostStateIn : public ::testing::Test {
 protected:
  std::unique_ptr<kernels::Backend> backend_ = kernels::host_backend(2);

  /// The chain begins with nothing, and with empty states; the order of the shards is free.
  void expect_exact(const HostShape& shape, std::vector<Shard> shards,
                    const std::vector<float>* sinks = nullptr) {
    const std::uint32_t seed = fresh_seed();
    SCOPED_TRACE("seed " + std::to_string(seed));
    HostProblem problem(shape, seed);
    const Result first = problem.run_chain(*backend_, shards, sinks);
    EXPECT_TRUE(is_close(problem.error(first, sinks)));
    EXPECT_TRUE(problem.run_chain(*backend_, shards, sinks, true).same_bits(first));
    if (shards.size() == 2 && !shape.parts) {
      EXPECT_TRUE(problem.run(*backend_, shards, sinks).same_bits(first));
    }
    std::reverse(shards.begin(), shards.end());
    EXPECT_TRUE(is_close(problem.error(problem.run_chain(*backend_, shards, sinks), sinks)));
  }
};

TEST_F(HostStateIn, DimsAndTypes) {
  for (const int dim : {8, 24, 64, 72, 128, 200, 256}) {
    if (tests::kSanitized && dim > 72) continue;
    for (const DType dtype : {fp32, fp16, bf16})
      for (const int ranks : {1, 2, 5})
        expect_exact({.dim = dim, .dtype = dtype, .query_len = {7}, .kv_len = {700}},
                     HostProblem::on_all(Shard::contiguous(700, 0, ranks)));
  }
}

// Rows that see keys of some shards only, and of none; decode whose keys are split among threads.
TEST_F(HostStateIn, MasksLayoutsAndSinks) {
  const Mask masks[] = {{},
                        {.causal = true},
                        {.causal = true, .window = 1},
                        {.causal = true, .window = 90},
                        {.window = 20, .right = 9}};
  const std::vector<float> sinks = {0.3f, -1.0f, 2.0f, 0.0f};
  for (const Mask& mask : masks)
    for (const Layout layout :
         {Layout::contiguous, Layout::zigzag, Layout::striped, Layout::interleaved})
      for (const int ranks : {2, 3}) {
        SCOPED_TRACE(std::string(name(layout)) + " causal " + std::to_string(mask.causal) +
                     " window " + std::to_string(mask.window) + " ranks " + std::to_string(ranks));
        const HostShape shape{.query_len = {150, 1, 0, 40, 90},
                              .kv_len = {400, tests::kSanitized ? 700 : 3000, 30, 40, 33},
                              .mask = mask};
        expect_exact(shape, HostProblem::on_all({layout, 0, ranks, 0, 128}), &sinks);
      }
}

TEST_F(HostStateIn, Features) {
  for (const bool skip : {false, true})
    for (const std::optional<Alibi> alibi :
         {std::optional<Alibi>{}, std::optional{Alibi::context}, std::optional{Alibi::query}}) {
      HostShape shape{.query_len = {9, 1, 33}, .kv_len = {200, 70, 500}, .mask = {.causal = true}};
      shape.softcap = skip ? 4.0f : 0.0f;
      shape.page = 16;
      shape.scales = true;
      shape.alibi = alibi;
      shape.qq = !skip;
      shape.skip_decode = skip;
      expect_exact(shape, HostProblem::on_all({Layout::striped, 0, 2}));
      shape.parts = {.count = 3};
      expect_exact(shape, HostProblem::on_all({Layout::striped, 0, 2}));
    }
}

// A state that a row keeps is kept to the bit, also with NaN in it, and that of a skipped sequence
// is unchanged.
TEST_F(HostStateIn, RowsWithoutKeysKeepTheirState) {
  const HostShape shape{.query_len = {4, 1}, .kv_len = {40, 50}, .skip_decode = true};
  HostProblem problem(shape, fresh_seed());
  const std::int64_t rows = problem.tokens() * shape.heads;
  std::vector<std::byte> memory(kernels::StateSlots::bytes(rows, shape.dim));
  const kernels::StateSlots state{memory.data(), rows, shape.dim, 1};
  std::mt19937 random(fresh_seed());
  std::normal_distribution<float> normal;
  for (std::int64_t row = 0; row < rows; ++row) {
    state.stats(0)[row] = {normal(random), std::exp(normal(random))};
    for (int d = 0; d < shape.dim; ++d) state.o(0, row)[d] = normal(random);
  }
  state.o(0, 1)[3] = kNan;
  state.stats(0)[2] = {kNan, kNan};
  const std::vector<std::byte> before = memory;
  // The third rank of three has no key of either sequence.
  const std::vector<std::int64_t> cuts = {0, 20, 40, 40, 0, 20, 50, 50};
  Shard shard{Layout::ranges, 2, 3};
  shard.table = cuts.data();
  kernels::AttendParams p = problem.params(shard, state, 0);
  p.resume = true;
  problem.attend(*backend_, p);
  EXPECT_EQ(memory, before);
  shard.rank = 1;  // and the second has some
  p = problem.params(shard, state, 0);
  p.resume = true;
  problem.attend(*backend_, p);
  EXPECT_TRUE(std::isnan(state.o(0, 1)[3]));
  EXPECT_TRUE(std::isnan(state.stats(0)[2].sum));
  const std::int64_t left_out = 4 * shape.heads;
  for (std::int64_t row = 0; row < rows; ++row) {
    const Stats& was =
        kernels::StateSlots{const_cast<std::byte*>(before.data()), rows, shape.dim}.stats(0)[row];
    EXPECT_EQ(std::memcmp(&was, &state.stats(0)[row], sizeof was) == 0, row >= left_out) << row;
  }
}

}  // namespace
}  // namespace longspan::tests
