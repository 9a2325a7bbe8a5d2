// Class ServingOps: its calls agree with each other, check on demand, and may come from several
// threads. The tests of serving compare them with float64.
#include <atomic>
#include <thread>

#include "tests/support/serving_calls.hpp"

namespace longspan {
namespace {

TEST(KernelsApi, ChecksOnDemand) {
  ServingCalls p;
  p.kernels.check(p.segmented());
  p.kernels.check(p.context());
  p.kernels.check(p.append());
  p.table[6] = -7;  // the last key of sequence 1, a new one
  expect_refused<InputError>(
      p, [&] { p.kernels.check(p.segmented()); }, "block_table[1][2] is -7");
  p.kernels.check(p.context());
  p.slots[0] = 1000;
  expect_refused<InputError>(
      p, [&] { p.kernels.check(p.append()); }, "slots[0] is 1000");
}

TEST(KernelsApi, ChecksOfSegmentsOnDemand) {
  ServingCalls p;
  SegmentedAttention a = p.handed_out();
  ReduceSegments r = p.reduce();
  for (const std::int64_t keys : {0, 11, 16}) {
    a.segments.keys = r.segments.keys = keys;
    p.kernels.check(a);
    p.kernels.segmented_attention(a);
    p.kernels.check(r);
  }
  ServingCalls q;
  a = q.handed_out(), r = q.reduce();
  a.segments.keys = r.segments.keys = 10;
  const std::string text = "sequence 1 has 33 keys and its segments hold 30";
  expect_refused<InputError>(
      q, [&] { q.kernels.check(a); }, text);
  expect_refused<InputError>(
      q, [&] { q.kernels.check(r); }, text);
}

/// Calls are const, so that several threads may share a ServingOps. ThreadSanitizer checks this.
TEST(KernelsApi, AppendsFromSeveralThreads) {
  const ServingOps kernels(Device::host, 2);
  constexpr int kThreads = 4, kRounds = 50;
  std::vector<ServingCalls> problems(kThreads);
  for (ServingCalls& p : problems) p.slots = {115, 3, 40, 41};
  std::vector<std::thread> threads;
  std::atomic<int> refused = 0;
  for (ServingCalls& p : problems)
    threads.emplace_back([&] {
      for (int round = 0; round < kRounds; ++round) {
        AppendKv a = p.append();
        a.k_cache.shape[0] = a.v_cache.shape[0] = round % 2 == 0 ? kPages : 8;  // of other sizes
        kernels.append_kv(a);
        std::vector<std::int64_t> twice{1, 2, 3, 2};
        a.slots = Tensor(twice.data(), {kTokens});
        try {
          kernels.append_kv(a);
        } catch (const InputError&) {
          ++refused;
        }
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(refused, kThreads * kRounds);
  for (ServingCalls& p : problems)
    for (int t = 0; t < kTokens; ++t)
      for (int i = 0; i < kKvHeads * kDim; ++i)
        ASSERT_EQ(p.k_cache[p.slots[t] * kKvHeads * kDim + i], p.new_k[t * kKvHeads * kDim + i]);
}

void expect_close(const std::vector<float>& a, const std::vector<float>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], 2e-6) << i;
}

TEST(KernelsApi, SegmentsReduceToTheResult) {
  ServingCalls p;
  SegmentedAttention a = p.handed_out();
  a.attention.sinks = Tensor(p.sinks.data(), {kHeads});
  p.kernels.segmented_attention(a);
  const std::vector<float> out = p.out, lse = p.lse;
  EXPECT_FALSE(std::isnan(out[0]));

  SegmentedAttention plain = p.segmented();
  plain.attention.sinks = Tensor(p.sinks.data(), {kHeads});
  p.kernels.segmented_attention(plain);
  expect_close(out, p.out);
  expect_close(lse, p.lse);

  p.out = nans(p.out.size()), p.lse = nans(p.lse.size());
  p.kernels.reduce_segments(p.reduce());  // no sink: segment 0 holds it
  expect_close(out, p.out);
  expect_close(lse, p.lse);
}

TEST(KernelsApi, AppendedContextIsTheWholeCache) {
  ServingCalls p;
  p.slots = {2 * 16 + 3, 5 * 16 + 14, 5 * 16 + 15, 3 * 16};  // positions 19; 30, 31, 32
  p.kernels.context_attention(p.context());
  const std::vector<float> out = p.out, lse = p.lse;
  p.kernels.append_kv(p.append());
  p.kernels.segmented_attention(p.segmented());
  expect_close(out, p.out);
  expect_close(lse, p.lse);

  p.out = nans(p.out.size()), p.lse = nans(p.lse.size());
  auto alone = p.common<ContextAttention>();
  p.kernels.context_attention(p.with_workspace(alone));  // without k and v
  p.kernels.check(p.with_workspace(alone));
  expect_close(out, p.out);
  expect_close(lse, p.lse);
}

TEST(KernelsApi, SkippedDecodeIsUntouched) {
  ServingCalls p;
  ContextAttention a = p.context();
  a.skip_decode = true;
  p.kernels.context_attention(a);
  const auto first_row = p.out.begin() + kHeads * kDim;
  EXPECT_TRUE(untouched({p.out.begin(), first_row}));
  EXPECT_TRUE(untouched({p.lse.begin(), p.lse.begin() + kHeads}));
  const std::vector<float> rest(first_row, p.out.end());
  p.kernels.context_attention(p.context());
  EXPECT_EQ(rest, std::vector<float>(p.out.begin() + kHeads * kDim, p.out.end()));
}

TEST(KernelsApi, WorkspaceNeedsShapesOnly) {
  ServingCalls p;
  ContextAttention a = p.context();
  PagedAttention& paged = a.attention;
  const std::size_t of_two = p.kernels.workspace_bytes(a);
  paged.kv_len.shape[0] = paged.block_table.shape[0] = 100;
  paged.query_start.shape[0] = 101;
  const std::size_t bytes = p.kernels.workspace_bytes(a);
  EXPECT_GT(bytes, of_two) << "each sequence takes some of it";
  paged.q.data = a.k.data = a.v.data = paged.k_cache.data = paged.v_cache.data = nullptr;
  paged.out.data = paged.block_table.data = nullptr;
  paged.query_start.data = paged.kv_len.data = nullptr;
  EXPECT_EQ(p.kernels.workspace_bytes(a), bytes);
}

}  // namespace
}  // namespace longspan
