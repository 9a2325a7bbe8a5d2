// Bits: the same for 1, 2, 4 ranks of one layout, in any batch, at any place in it, eagerly and in
// a replayed graph, and from run to run.
#include "tests/gpu/gpu_judge.hpp"

namespace longspan::test {
namespace {

Result result_of(const Case& c) {
  const Data data(c);
  GpuRun run(c, data);
  return run.run();
}

/// One layout, 1 to 4 and 64 ranks.
void expect_same_bits_on_ranks(Case c) {
  if (is_left_out(4 * work_of(c))) return;
  const Data data(c);
  c.ranks = 1;
  const Result one = GpuRun(c, data).run();
  for (int ranks : {2, 4, 64}) {
    c.ranks = ranks;
    SCOPED_TRACE(::testing::Message() << c);
    expect_same_bits(one, GpuRun(c, data).run());
  }
}

TEST(Bits, RanksShortQueries) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32})
    for (Layout layout : {Layout::contiguous, Layout::interleaved})
      for (int kv_len : {1, 127, 4097, 5000, 131073})
        expect_same_bits_on_ranks({.dtype = dtype,
                                   .heads = 4,
                                   .kv_heads = 1,
                                   .dim = 64,
                                   .q_lens = {kv_len > 100 ? 3 : 1},
                                   .kv_lens = {kv_len},
                                   .mask = {.causal = true},
                                   .layout = layout,
                                   .seed = fresh_seed()});
}

TEST(Bits, RanksLongQueriesInvariant) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : {DType::bf16, DType::fp32})
    for (Layout layout : {Layout::contiguous, Layout::interleaved})
      for (int kv_len : {1, 127, 4097, 5000, 131073})
        for (std::int64_t window : {0, 3000})
          for (int dim : {40, 64})  // on Hopper the kernels differ
            expect_same_bits_on_ranks({.dtype = dtype,
                                       .heads = 2,
                                       .kv_heads = 1,
                                       .dim = dim,
                                       .q_lens = {70},
                                       .kv_lens = {kv_len},
                                       .mask = {.causal = true, .window = window},
                                       .layout = layout,
                                       .invariant = true,
                                       .seed = fresh_seed()});
}

TEST(Bits, RanksInterleavedByLargerBlocks) {
  LONGSPAN_NEEDS_GPU();
  for (std::int64_t block : {256, 1024})
    for (int q_len : {2, 40})
      expect_same_bits_on_ranks({.heads = 4,
                                 .kv_heads = 2,
                                 .dim = 128,
                                 .q_lens = {q_len},
                                 .kv_lens = {reduced(30001, 3001)},
                                 .mask = {.causal = true},
                                 .layout = Layout::interleaved,
                                 .block = block,
                                 .invariant = true,
                                 .seed = fresh_seed()});
}

/// A sequence alone and among others: the rows of a short and of a long invariant sequence.
TEST(Bits, BatchComposition) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : {DType::bf16, DType::fp32})
    for (int q_len : {1, 6, 16, 17, 150, 151}) {
      Case alone{.dtype = dtype,
                 .heads = 10,
                 .kv_heads = 2,
                 .dim = q_len == 151 ? 40 : 64,  // on Hopper the kernels differ
                 .q_lens = {q_len},
                 .kv_lens = {reduced(3333, 933)},
                 .mask = {.causal = true},
                 .ranks = 2,
                 .invariant = true,
                 .seed = fresh_seed()};
      if (is_left_out(4 * work_of(alone))) continue;
      const Data own(alone);
      const Result expected = GpuRun(alone, own).run();
      Case batch = alone;
      batch.q_lens = {200, 3, q_len, 1};
      batch.kv_lens = {500, 70, alone.kv_lens[0], reduced(8000, 1500)};
      Data all(batch);
      const std::size_t row = static_cast<std::size_t>(alone.heads * alone.dim) * size_of(dtype);
      std::copy(own.q.begin(), own.q.end(), all.q.begin() + static_cast<std::ptrdiff_t>(203 * row));
      all.k[2] = own.k[0];
      all.v[2] = own.v[0];
      const Result whole = GpuRun(batch, all).run();
      SCOPED_TRACE(::testing::Message() << alone);
      const auto out = whole.out.begin() + static_cast<std::ptrdiff_t>(203 * row);
      const auto lse = whole.lse.begin() + 203 * alone.heads;
      expect_same_bits(expected, {{out, out + static_cast<std::ptrdiff_t>(expected.out.size())},
                                  {lse, lse + static_cast<std::ptrdiff_t>(expected.lse.size())}});
    }
}

TEST(Bits, RunToRun) {
  LONGSPAN_NEEDS_GPU();
  for (int q_len : {1, reduced(500, 100)}) {
    const Case c{.heads = 16,
                 .kv_heads = 4,
                 .dim = 128,
                 .q_lens = {q_len},
                 .kv_lens = {reduced(4000, 400)},
                 .mask = {.causal = true},
                 .seed = fresh_seed()};
    const Data data(c);
    GpuRun run(c, data);
    const Result first = run.run();
    for (int again = 0; again < reduced(10, 2); ++again) expect_same_bits(first, run.run());
  }
}

/// A graph captured with some lengths, replayed with others, gives the result of an eager call.
TEST(Bits, GraphReplayWithOtherLengths) {
  LONGSPAN_NEEDS_GPU();
  for (const bool invariant : {false, true}) {
    if (is_left_out(400)) continue;
    const Case c{.heads = 8,
                 .kv_heads = 2,
                 .dim = 64,
                 .q_lens = {1, 40, 16, 7},
                 .kv_lens = {reduced(5000, 2000), 800, 90, 3000},
                 .mask = {.causal = true},
                 .ranks = 2,
                 .invariant = invariant,
                 .seed = fresh_seed()};
    const Data data(c);
    GpuRun run(c, data);
    cudaStream_t stream;
    ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    run.queue(stream);
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&replay, graph, 0), cudaSuccess);
    using Lengths = std::vector<std::int32_t>;
    for (const auto& [queries, keys] :
         {std::pair<Lengths, Lengths>{{0, 1, 41, 57, 64}, {reduced(5000, 2000), 800, 90, 3000}},
          {{0, 20, 21, 61, 64}, {reduced(4000, 1000), 100, 0, 2000}},
          {{0, 3, 3, 3, 10}, {1, 2, 3, 2999}}}) {
      cudaMemcpy(run.query_start().data(), queries.data(), queries.size() * 4, cudaMemcpyDefault);
      cudaMemcpy(run.kv_len().data(), keys.data(), keys.size() * 4, cudaMemcpyDefault);
      run.poison();
      run.queue();
      const Result eager = run.result();
      run.poison();
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      ASSERT_EQ(cudaGraphLaunch(replay, stream), cudaSuccess);
      ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
      const std::size_t rows = static_cast<std::size_t>(queries.back() * c.heads);
      Result replayed = run.result();
      Result expected = eager;
      for (Result* r : {&replayed, &expected}) {  // rows past the last sequence are not written
        r->out.resize(rows * static_cast<std::size_t>(c.dim) * 2);
        r->lse.resize(rows);
      }
      for (float lse : expected.lse) EXPECT_FALSE(std::isnan(lse));
      expect_same_bits(expected, replayed);
    }
    cudaGraphExecDestroy(replay);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
  }
}

/// Lengths from device arrays give the bits of lengths that the host knows: for short queries
/// always, for long ones in the fixed order. Otherwise the host's knowledge decides the number of
/// splits.
TEST(Bits, WhereLengthsAreKnown) {
  LONGSPAN_NEEDS_GPU();
  for (int q_len : {1, 12, reduced(60, 20)}) {
    Case c{.heads = 8,
           .kv_heads = 2,
           .dim = 128,
           .q_lens = {q_len},
           .kv_lens = {reduced(7000, 1700)},
           .mask = {.causal = true},
           .invariant = q_len > 16,
           .seed = fresh_seed()};
    const Result known = result_of(c);
    c.device_lengths = true;
    expect_same_bits(known, result_of(c));
  }
}

}  // namespace
}  // namespace longspan::test
