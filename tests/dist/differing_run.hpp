// A run of one sequence for kernels that begin before all rows have come. One rank has other
// arguments: every rank reports it, and none waits for data that will not come.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>

#include "tests/dist/layer_run.hpp"
#include "tests/dist/world.hpp"
#include "tests/support/message.hpp"

namespace longspan::tests {

inline void expect_what_differs_is_named(const char* strategy) {
  if (test_world().size() == 1) GTEST_SKIP() << "one rank cannot disagree";
  if (test_world().device() == Device::host) GTEST_SKIP() << "no kernel there begins early";
  const bool last = test_world().rank() == test_world().size() - 1;
  const auto refused = [&](std::int32_t rows, std::int32_t keys, bool sinks, const char* text) {
    const Communicator world = test_world();  // a run with different arguments ends its own
    const Problem problem({.heads = 8,
                           .kv_heads = 8,
                           .dim = 64,
                           .dtype = DType::bf16,
                           .q_lens = {rows},
                           .kv_lens = {keys},
                           .mask = {.causal = true},
                           .sinks = sinks},
                          shared_seed(world));
    Options options = options_for(problem, world);
    options.strategy = strategy;
    options.invariant = false;
    options.limits = {.max_tokens = 200, .max_kv_len = 1000};
    try {
      run(world, problem, Shard::zigzag(keys, world.rank(), world.size()), options,
          Shard::zigzag(rows, world.rank(), world.size()));
      FAIL() << "ranks disagreed and nobody said so";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr(text));
    }
  };
  refused(90, 600, last, "'sinks' differs between ranks");
  refused(90, last ? 599 : 600, false, "'total_keys' differs between ranks");
  refused(90, last ? 0 : 600, false, "'total_keys' differs between ranks");
  refused(last ? 89 : 90, 600, false, "'total_tokens' differs between ranks");
}

}  // namespace longspan::tests
