// Options that cannot be combined with a share of the query rows, on every device.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "kernels/backend.hpp"
#include "longspan/error.hpp"

namespace longspan::tests {

inline void expect_refusals_of_query_shards(const kernels::Backend& backend) {
  kernels::AttendParams p;
  p.head_dim = p.value_dim = 64;
  p.queries = {Layout::zigzag, 1, 2};
  backend.check(p);
  const auto message = [&] {
    try {
      backend.check(p);
    } catch (const Unsupported& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  p.batch.skip_decode = true;
  EXPECT_THAT(message(), ::testing::HasSubstr("skip_decode with sharded queries"));
  p.batch.skip_decode = false;
  float new_key = 0;
  p.new_k.data = &new_key;
  EXPECT_THAT(message(), ::testing::HasSubstr("new keys with sharded queries"));
  p.new_k.data = nullptr;
  p.queries.layout = Layout::listed;
  EXPECT_THAT(message(), ::testing::HasSubstr("listed queries"));
}

}  // namespace longspan::tests
