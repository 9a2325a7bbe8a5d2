// Small cases of every kernel of backward, a schedule each, as those of attention in
// kernels_test.cpp.
#include <gtest/gtest.h>

#include "tests/support/device_gradients.hpp"
#include "tests/support/fresh_seed.hpp"

namespace longspan::tests {
namespace {

struct Named {
  const char* name;
  GradientCase c;
};
void PrintTo(const Named& named, std::ostream* out) { *out << named.name; }

class AttendGradients : public ::testing::TestWithParam<Named> {};
TEST_P(AttendGradients, AsFloat64) {
  const GradientCase& c = GetParam().c;
  const DeviceGradients problem(c, fresh_seed());
  EXPECT_TRUE(is_close(c, problem.run(*kernels::cuda_backend()), problem.plain<double>(),
                       problem.plain<float>()));
}

constexpr DType kBf16 = DType::bf16, kFp16 = DType::fp16;

// Several tiles stream by each owned one, and several work tiles follow each other in a block of
// the fixed order.
const Named kCases[] = {
    {"fp32", {.query_len = {70}, .kv_len = {140}, .mask = {.causal = true}}},
    {"fp32_of_dim_130", {.dim = 130, .query_len = {40}, .kv_len = {70}}},
    {"fp32_listed", {.query_len = {40}, .kv_len = {140}, .keys = {Layout::listed}, .key_ranks = 2}},
    {"fp32_biases", {.query_len = {20, 70}, .kv_len = {20, 80}, .alibi = Alibi::query, .qq = true}},
    {"fp32_qq_striped",
     {.query_len = {40}, .kv_len = {50}, .qq = true, .rows = {Layout::striped}, .row_ranks = 2}},
    {"fp32_in_order",
     {.heads = 2,
      .kv_heads = 2,
      .query_len = {150},
      .kv_len = {300},
      .mask = {.causal = true},
      .invariant = true}},
    {"tf32",
     {.heads = 1, .query_len = {100}, .kv_len = {150}, .mask = {.causal = true}, .tf32 = true}},
    {"tf32_of_dim_128", {.heads = 1, .dim = 128, .query_len = {70}, .kv_len = {90}, .tf32 = true}},
    {"bf16",
     {.dtype = kBf16,
      .heads = 1,
      .query_len = {200},
      .kv_len = {330},
      .mask = {.causal = true, .window = 50}}},
    {"fp16_groups",
     {.dtype = kFp16,
      .heads = 6,
      .kv_heads = 2,
      .dim = 40,
      .query_len = {50, 0, 20},
      .kv_len = {80, 10, 70},
      .mask = {.causal = true}}},
    {"bf16_of_dim_128",
     {.dtype = kBf16, .heads = 1, .dim = 128, .query_len = {70}, .kv_len = {150}}},
    {"bf16_of_heads_64_and_48",
     {.dtype = kBf16,
      .heads = 2,
      .dim = 64,
      .value_dim = 48,
      .query_len = {220},
      .kv_len = {150},
      .mask = {.right = 70}}},
    {"bf16_keys_that_nobody_sees",
     {.dtype = kBf16,
      .heads = 1,
      .query_len = {20},
      .kv_len = {400},
      .mask = {.causal = true, .window = 30}}},
    {"bf16_chunks",
     {.dtype = kBf16,
      .heads = 1,
      .query_len = {140},
      .kv_len = {200},
      .mask = {.causal = true, .chunk = 45, .lookback = 1}}},
    {"bf16_images_and_prefixes",
     {.dtype = kBf16,
      .heads = 1,
      .query_len = {70, 130},
      .kv_len = {70, 170},
      .mask = {.causal = true, .window = 30, .prefix = 50},
      .bidirectional = {10, 40, 41, 70, 60, 160, 165, 170},
      .prefix = {20, 50}}},
    {"fp32_images_and_prefixes",
     {.query_len = {40},
      .kv_len = {140},
      .mask = {.causal = true, .chunk = 20, .prefix = 50, .clamp_ranges = true},
      .alibi = Alibi::query,
      .bidirectional = {100, 130, 133, 140}}},
    {"bf16_of_dim_128_groups",
     {.dtype = kBf16,
      .heads = 2,
      .dim = 128,
      .query_len = {70, 130},
      .kv_len = {70, 270},
      .mask = {.causal = true}}},
    {"bf16_of_dim_256",
     {.dtype = kBf16,
      .heads = 2,
      .dim = 256,
      .query_len = {70, 150},
      .kv_len = {100, 150},
      .mask = {.causal = true, .window = 90}}},
    {"bf16_of_heads_192_and_128",
     {.dtype = kBf16,
      .heads = 2,
      .dim = 192,
      .value_dim = 128,
      .query_len = {40, 260},
      .kv_len = {70, 330},
      .mask = {.causal = true}}},
    {"bf16_of_heads_136_and_40",
     {.dtype = kBf16,
      .heads = 1,
      .dim = 136,
      .value_dim = 40,
      .query_len = {130},
      .kv_len = {290},
      .mask = {.causal = true, .window = 30}}},
    {"bf16_any_strides",
     {.dtype = kBf16,
      .dout_dtype = DType::fp32,
      .heads = 1,
      .query_len = {70},
      .kv_len = {140},
      .gap = 1}},
    {"bf16_biases",
     {.dtype = kBf16,
      .heads = 2,
      .query_len = {90},
      .kv_len = {130},
      .mask = {.causal = true},
      .softcap = 2,
      .alibi = Alibi::context}},
    {"bf16_striped",
     {.dtype = kBf16,
      .heads = 1,
      .query_len = {140},
      .kv_len = {180},
      .mask = {.causal = true},
      .keys = {Layout::striped},
      .key_ranks = 2,
      .rows = {Layout::striped},
      .row_ranks = 2}},
    {"bf16_in_order",
     {.dtype = kBf16,
      .heads = 2,
      .kv_heads = 2,
      .query_len = {150},
      .kv_len = {330},
      .mask = {.causal = true, .window = 60},
      .invariant = true}},
};
std::string name_of(const ::testing::TestParamInfo<Named>& given) { return given.param.name; }

INSTANTIATE_TEST_SUITE_P(Gradients, AttendGradients, ::testing::ValuesIn(kCases), name_of);

}  // namespace
}  // namespace longspan::tests
