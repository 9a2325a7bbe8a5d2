// Memory is counted before it is allocated: the figures are those of the tensors, no size overflows
// them, and too much is refused with them.
#include "launcher/problem/demand.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <string>

#include "launcher/problem/world.hpp"

namespace longspan::launcher {
namespace {

double part(const Demand::Parts& parts, const std::string& name) {
  for (const auto& [what, bytes] : parts)
    if (what == name) return bytes;
  ADD_FAILURE() << "no part " << name;
  return 0;
}

Problem problem_of(std::int32_t kv, std::int32_t tokens, int heads) {
  Problem p;
  p.options = {.heads = heads, .kv_heads = heads, .head_dim = 64, .dtypes = {.compute = fp32}};
  p.q_lens = {tokens};
  p.kv_lens = {kv};
  p.q = generated(1, 0, fp32, tokens, heads, 64);
  p.k = generated(1, 1, fp32, kv, heads, 64);
  p.v = generated(1, 2, fp32, kv, heads, 64);
  return p;
}

TEST(Demand, CountsTheTensors) {
  const Demand d = demand_of(self(), problem_of(1000, 10, 8), 0);
  EXPECT_EQ(part(d.host, "keys and values"), 2.0 * 1000 * 8 * 64 * 4);
  EXPECT_EQ(part(d.host, "queries"), 10.0 * 8 * 64 * 4);
  EXPECT_EQ(part(d.host, "results"), 10.0 * 8 * (64 + 1) * 4);
  EXPECT_EQ(part(d.host, "the layer's workspace"), 10.0 * 8 * (64 + 2) * 4);
  EXPECT_TRUE(d.device.empty());
  const Demand checked = demand_of(self(), problem_of(1000, 10, 8), 4);
  EXPECT_GE(part(checked.host, "the comparison with float64"), 2.0 * 1000 * 64 * 8);
}

TEST(Demand, NoSizeOverflows) {
  const Demand d = demand_of(self(), problem_of(2147483647, 2147483647, 65536), -1);
  for (const auto& [what, bytes] : d.host) {
    EXPECT_TRUE(std::isfinite(bytes)) << what;
    EXPECT_GE(bytes, 0) << what;
  }
  EXPECT_GT(part(d.host, "keys and values"), 0x1p50);
  DecodeShape shape{
      .options = {.heads = 65536, .kv_heads = 65536, .head_dim = 512, .dtypes = {.compute = fp32}},
      .batch = 65536,
      .kv_len = 2147483000};
  EXPECT_GT(part(demand_of(self(), shape).host, "caches"), 0x1p70);
  EXPECT_THROW(require_memory(self(), demand_of(self(), shape)), SharedError);
}

TEST(Demand, TooMuchIsRefusedWithTheFigures) {
  const double available = available_memory();
  EXPECT_GT(available, 0);
  require_memory(self(), {{}, {{"a little", 1.0}}});
  try {
    require_memory(self(), {{}, {{"this", 2e15}, {"that", 1e15}, {"another", 5}}});
    FAIL() << "3e15 bytes were taken to be there";
  } catch (const SharedError& error) {
    EXPECT_EQ(error.kind(), ErrorKind::usage);
    const std::string text = error.what();
    for (const char* word : {"2.794e+06 GiB of memory", "1.863e+06 GiB for this", "for that"})
      EXPECT_NE(text.find(word), std::string::npos) << text;
    EXPECT_EQ(text.find("another"), std::string::npos) << text;
  }
  EXPECT_NO_THROW(require_memory_for_batch(1));
  EXPECT_THROW(require_memory_for_batch(std::int64_t{1} << 60), UsageError);
}

}  // namespace
}  // namespace longspan::launcher
