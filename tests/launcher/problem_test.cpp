// The options that the command gives a layer for a problem: the layer refuses a promise that does
// not hold when it runs.
#include "launcher/problem/problem.hpp"

#include <gtest/gtest.h>

namespace longspan::launcher {
namespace {

Problem problem_of(std::vector<std::int32_t> lengths) {
  Problem p;
  p.options = {.heads = 2, .kv_heads = 2, .head_dim = 16};
  p.q_lens = p.kv_lens = std::move(lengths);
  p.queries = p.keys = {.layout = Layout::zigzag};
  return p;
}

bool promises_dense_keys(const Problem& p) { return p.layer_options(2).limits.dense_keys; }

TEST(Problem, PromisesDenseKeysOnlyWhereEveryRunHasThem) {
  const Problem one = problem_of({500});
  EXPECT_TRUE(promises_dense_keys(one));
  EXPECT_FALSE(promises_dense_keys(problem_of({500, 20})));
  Problem paged = one;
  paged.cache = {.page = 16};
  EXPECT_FALSE(promises_dense_keys(paged));
  Problem roomy = one;
  roomy.capacity = 600;
  EXPECT_FALSE(promises_dense_keys(roomy));
  Problem ranges = one;  // whose lengths a GPU's host does not know
  ranges.keys = {.layout = Layout::ranges, .ranges = {0, 100, 500}};
  EXPECT_FALSE(promises_dense_keys(ranges));
}

}  // namespace
}  // namespace longspan::launcher
