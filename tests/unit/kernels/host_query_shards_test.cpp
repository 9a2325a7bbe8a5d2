// A rank's share of the query rows, on the host: masks and biases depend on a row's position in its
// sequence, for every layout of the rows against every layout of the keys. Against float64, and
// with the bits of all rows at once.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <string>

#include "tests/support/fresh_seed.hpp"
#include "tests/support/host_problem.hpp"
#include "tests/support/query_shards_refusals.hpp"

namespace longspan::tests {
namespace {

/// Mixed lengths: a chunk, a decode, a chunk without context, nothing, and fewer rows than ranks.
HostShape mixed() {
  return {
      .query_len = {187, 1, 70, 0, 2}, .kv_len = {300, 421, 70, 33, 50}, .mask = {.causal = true}};
}

class QueryShards : public ::testing::Test {
 protected:
  /// Cuts of every sequence, uneven on purpose: the first rank has half and more.
  std::vector<std::int64_t> cuts(const HostShape& shape, int ranks) const {
    std::vector<std::int64_t> table;
    for (std::int64_t len : shape.query_len)
      for (int r = 0; r <= ranks; ++r)
        table.push_back(r == 0 ? 0 : r == ranks ? len : std::min(len, len / 2 + r));
    return table;
  }

  void expect_exact(const HostShape& shape) {
    const std::uint32_t seed = fresh_seed();
    HostProblem problem(shape, seed);
    for (const Shard& keys : {Shard::contiguous(0, 0, 1), Shard::zigzag(0, 0, 2),
                              Shard::striped(0, 0, 3), Shard::interleaved(0, 0, 4, 16)}) {
      const std::vector<Shard> shards = HostProblem::on_all(keys);
      const Result whole = problem.run(*backend_, shards);
      EXPECT_TRUE(is_close(problem.error(whole))) << "seed " << seed;
      for (int ranks : {2, 3, 4}) {
        const std::vector<std::int64_t> table = cuts(shape, ranks);
        for (const Shard& rows :
             {Shard::contiguous(0, 0, ranks), Shard::zigzag(0, 0, ranks),
              Shard::striped(0, 0, ranks), Shard::interleaved(0, 0, ranks, 1),
              Shard::interleaved(0, 0, ranks, 5), Shard::ranges(0, 0, ranks, table.data())}) {
          SCOPED_TRACE(std::string("rows ") + name(rows.layout) + " by " +
                       std::to_string(rows.block) + " on " + std::to_string(ranks) + ", keys " +
                       name(keys.layout) + ", seed " + std::to_string(seed));
          const Result found = problem.run_by_rows(*backend_, shards, rows);
          EXPECT_TRUE(found.same_bits(whole));
        }
      }
    }
  }

  std::unique_ptr<kernels::Backend> backend_ = kernels::host_backend(2);
};

TEST_F(QueryShards, EachFeatureAlone) {
  const std::vector<std::pair<const char*, std::function<void(HostShape&)>>> features = {
      {"causal", [](HostShape&) {}},
      {"window", [](HostShape& s) { s.mask.window = 60; }},
      {"to the right", [](HostShape& s) { s.mask = {.window = 60, .right = 20}; }},
      {"causal per sequence",
       [](HostShape& s) {
         s.causal = {1, 0, 0, 1, 1};
       }},
      {"ALiBi context", [](HostShape& s) { s.alibi = Alibi::context; }},
      {"ALiBi query", [](HostShape& s) { s.alibi = Alibi::query; }},
      {"qq_bias", [](HostShape& s) { s.qq = true; }},
      {"pages", [](HostShape& s) { s.page = 16; }},
  };
  for (const auto& [name, switch_on] : features) {
    SCOPED_TRACE(name);
    HostShape shape = mixed();
    switch_on(shape);
    expect_exact(shape);
  }
}

TEST_F(QueryShards, AllTogether) {
  HostShape s = mixed();
  s.dtype = bf16;
  s.kv_dtype = e4m3;
  s.mask.window = 250;
  s.softcap = 20.0f;
  s.page = 16;
  s.scales = true;
  s.alibi = Alibi::query;
  s.qq = true;
  s.causal = {1, 0, 1, 1, 0};
  expect_exact(s);
}

TEST_F(QueryShards, Documents) {
  for (const bool causal : {false, true}) {
    HostShape s{.query_len = {700}, .kv_len = {700}, .mask = {.causal = causal}};
    s.documents = {40, 300, 301, 620, 690};
    expect_exact(s);
  }
}

TEST_F(QueryShards, KeysInAnyOrder) {
  HostProblem problem({.query_len = {150}, .kv_len = {300}, .mask = {.causal = true, .window = 90}},
                      fresh_seed());
  std::vector<std::int64_t> positions(300);
  std::iota(positions.begin(), positions.end(), 0);
  std::shuffle(positions.begin(), positions.end(), std::mt19937(fresh_seed()));
  const std::vector<Shard> shards = {Shard::at_positions(300, 0, 2, positions.data(), 170),
                                     Shard::at_positions(300, 1, 2, positions.data() + 170, 130)};
  for (const Shard& rows : {Shard::zigzag(0, 0, 3), Shard::striped(0, 0, 2)})
    EXPECT_TRUE(is_close(problem.error(problem.run_by_rows(*backend_, shards, rows))));
}

/// Without arrays the length of the shard is the number of rows of all ranks.
TEST_F(QueryShards, OneSequenceByItsLength) {
  HostProblem problem({.query_len = {50}, .kv_len = {80}, .mask = {.causal = true}}, fresh_seed());
  const Result whole = problem.run(*backend_);
  const Shard rows = Shard::striped(50, 1, 2);
  const std::int64_t count = rows.local_len(50), row = std::int64_t{4} * 64;
  std::vector<std::byte> memory(kernels::StateSlots::bytes(count * 4, 64), std::byte{0xff});
  const kernels::StateSlots state{memory.data(), count * 4, 64, 1};
  kernels::AttendParams p = problem.params(Shard::contiguous(80, 0, 1), state, 0);
  p.tokens = count;
  p.q.data = static_cast<std::byte*>(p.q.data) + problem.q_stride() * 4;  // row 1, 3 ...
  p.q.row_stride *= 2;
  p.batch = {};
  p.queries = rows;
  problem.attend(*backend_, p);
  const Result found = problem.merge(*backend_, state, false, nullptr, count);
  for (std::int64_t t = 0; t < count; ++t)
    for (std::int64_t i = 0; i < row; ++i)
      ASSERT_EQ(found.out[t * row + i], whole.out[(2 * t + 1) * row + i]) << t << " " << i;
}

TEST_F(QueryShards, WhatIsRefused) { tests::expect_refusals_of_query_shards(*backend_); }

}  // namespace
}  // namespace longspan::tests
