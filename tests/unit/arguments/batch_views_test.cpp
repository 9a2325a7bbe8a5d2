// Queries, results and lse in a model's layout, [batch, heads, tokens, dim]: the bits of the same
// contiguous rows, nothing copied, and sizes that overflow. batch_rows_test has more.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "longspan/longspan.hpp"
#include "tests/support/fresh_seed.hpp"

namespace longspan {
namespace {

constexpr int kHeads = 4, kKvHeads = 2, kDim = 32, kTokens = 5, kCapacity = 200;

std::vector<float> random_values(std::size_t count, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

/// [batch, heads, tokens, dim] over memory [batch, tokens, heads, dim].
Tensor model_view(const std::vector<float>& memory, std::int64_t batch) {
  Tensor t(memory.data(), {batch, kHeads, kTokens, kDim});
  t.stride = {kTokens * kHeads * kDim, kDim, kHeads * kDim, 1};
  return t;
}

struct Problem {
  std::int64_t batch;
  std::vector<float> q, k, v;
  std::vector<std::int32_t> start, lens;
  Attention layer;

  explicit Problem(std::int64_t sequences)
      : batch(sequences),
        layer(self(), {.heads = kHeads,
                       .kv_heads = kKvHeads,
                       .head_dim = kDim,
                       .dtypes = {.compute = fp32},
                       .mask = {.causal = true},
                       .limits = {.max_tokens = sequences * kTokens,
                                  .max_batch = static_cast<int>(sequences)},
                       .threads = 1}) {
    std::mt19937 random(tests::fresh_seed());
    q = random_values(static_cast<std::size_t>(batch) * kTokens * kHeads * kDim, random);
    k = random_values(static_cast<std::size_t>(batch) * kCapacity * kKvHeads * kDim, random);
    v = random_values(k.size(), random);
    for (int b = 0; b <= batch; ++b) start.push_back(b * kTokens);
    for (int b = 0; b < batch; ++b) lens.push_back(kCapacity - 30 * b);
  }

  AttentionArgs args(const Tensor& queries, const Tensor& out, const Lse& lse) const {
    AttentionArgs a{.q = queries, .k = cache(k), .v = cache(v), .out = out, .lse = lse};
    a.query_start = {start.data(), {batch + 1}};
    a.kv_len = {lens.data(), {batch}};
    return a;
  }
  Tensor cache(const std::vector<float>& memory) const {
    return {memory.data(), {batch, kCapacity, kKvHeads, kDim}};
  }
};

TEST(BatchViews, HaveTheBitsOfRowsOneBehindTheOther) {
  for (const std::int64_t batch : {1, 3}) {
    Problem p(batch);
    const std::int64_t rows = batch * kTokens;
    std::vector<float> flat(p.q.size(), NAN), viewed(p.q.size(), NAN);
    std::vector<float> flat_lse(static_cast<std::size_t>(rows) * kHeads, NAN),
        viewed_lse(flat_lse.size(), NAN);
    p.layer.run(p.args({p.q.data(), {rows, kHeads, kDim}}, {flat.data(), {rows, kHeads, kDim}},
                       Lse::tokens_heads({flat_lse.data(), {rows, kHeads}})));
    p.layer.run(p.args(model_view(p.q, batch), model_view(viewed, batch),
                       Lse::tokens_heads({viewed_lse.data(), {batch, kTokens, kHeads}})));
    for (const float value : flat) ASSERT_FALSE(std::isnan(value));
    EXPECT_EQ(std::memcmp(flat.data(), viewed.data(), flat.size() * sizeof(float)), 0);
    EXPECT_EQ(std::memcmp(flat_lse.data(), viewed_lse.data(), flat_lse.size() * sizeof(float)), 0);
  }
}

TEST(BatchViews, OneSequenceMayLieHeadByHead) {
  Problem p(1);
  std::vector<float> by_heads(p.q.size()), flat(p.q.size(), NAN), found(p.q.size(), NAN);
  for (int t = 0; t < kTokens; ++t)
    for (int h = 0; h < kHeads; ++h)
      std::memcpy(&by_heads[static_cast<std::size_t>(h * kTokens + t) * kDim],
                  &p.q[static_cast<std::size_t>(t * kHeads + h) * kDim], kDim * sizeof(float));
  std::vector<float> flat_lse(kTokens * kHeads, NAN), found_lse(kTokens * kHeads, NAN);
  p.layer.run(p.args({p.q.data(), {kTokens, kHeads, kDim}}, {flat.data(), {kTokens, kHeads, kDim}},
                     Lse::tokens_heads({flat_lse.data(), {kTokens, kHeads}})));
  p.layer.run(p.args({by_heads.data(), {1, kHeads, kTokens, kDim}},
                     {found.data(), {1, kHeads, kTokens, kDim}},
                     Lse::heads_tokens({found_lse.data(), {1, kHeads, kTokens}})));
  for (int t = 0; t < kTokens; ++t)
    for (int h = 0; h < kHeads; ++h) {
      for (int d = 0; d < kDim; ++d)
        ASSERT_EQ(found[static_cast<std::size_t>(h * kTokens + t) * kDim + d],
                  flat[static_cast<std::size_t>(t * kHeads + h) * kDim + d]);
      EXPECT_EQ(found_lse[h * kTokens + t], flat_lse[t * kHeads + h]);
    }
}

/// Extents that 32 bits cannot count, of a tensor without elements: the product of extents is never
/// computed, nor that of one of them and its stride.
TEST(BatchViews, EmptyBatchesOfAnySizeAreRefused) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  const ServingOps ops(Device::host, 1);
  for (const int d : {0, 2}) {
    AttendState call;
    call.q = Tensor(nullptr, fp32, {32, kHeads, 32, 0});
    call.q.shape[d] = kMost;
    try {
      ops.attend_state(call);
      ADD_FAILURE() << "an extent of 2^63 - 1 was taken";
    } catch (const InputError& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr("0 to 2^31 - 1 of each are possible"));
    }
  }
  AttendState call;
  call.q = Tensor(nullptr, fp32, {2, kHeads, 1 << 30, 0});
  call.q.stride[2] = std::int64_t{1} << 56;  // the most that is accepted, without any memory
  EXPECT_THROW(ops.attend_state(call), InputError);
}

}  // namespace
}  // namespace longspan
