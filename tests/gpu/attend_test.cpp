// The CUDA kernels against float64, over all combinations: head dims, groups, dtypes, masks,
// layouts with simulated ranks, and batches of uneven lengths. Each test draws fresh inputs.
#include "tests/gpu/gpu_judge.hpp"

namespace longspan::test {
namespace {

void check(const Case& c, int stride = 1) {
  if (is_left_out(work_of(c))) return;
  const Data data(c);
  GpuRun run(c, data);
  expect_exact(c, data, run.run(), stride);
}

const DType kTypes[] = {DType::bf16, DType::fp16, DType::fp32};

TEST(Attend, EveryHeadDim) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (int dim : {16, 24, 32, 40, 64, 72, 96, 104, 128, 136, 160, 192, 200, 256})
      for (int q_len : {3, 40})
        check({.dtype = dtype,
               .heads = 2,
               .kv_heads = 1,
               .dim = dim,
               .q_lens = {q_len},
               .kv_lens = {333},
               .mask = {.causal = true},
               .seed = fresh_seed()});
}

TEST(Attend, EveryGroup) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (int group : {1, 2, 3, 4, 5, 7, 8, 12, 16})
      for (int q_len : {1, 5, 16, 17, 50})
        check({.dtype = dtype,
               .heads = 2 * group,
               .kv_heads = 2,
               .dim = 64,
               .q_lens = {q_len},
               .kv_lens = {260},
               .mask = {.causal = true},
               .seed = fresh_seed()});
}

TEST(Attend, EveryMask) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (const Mask& mask : kMasks)
      for (int q_len : {4, 200})
        for (bool invariant : {false, true})
          check({.dtype = dtype,
                 .heads = 3,
                 .kv_heads = 1,
                 .dim = 64,
                 .q_lens = {q_len},
                 .kv_lens = {700},
                 .mask = mask,
                 .invariant = invariant,
                 .seed = fresh_seed()},
                3);
}

TEST(Attend, ScaleAndSoftcap) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (float scale : {0.05f, -0.1f, 0.7f})
      for (float softcap : {0.0f, 2.0f, 30.0f})
        for (int q_len : {2, 90})
          check({.dtype = dtype,
                 .dim = 128,
                 .q_lens = {q_len},
                 .kv_lens = {400},
                 .mask = {.causal = true},
                 .softcap = softcap,
                 .scale = scale,
                 .sinks = true,
                 .seed = fresh_seed()},
                2);
}

TEST(Attend, EveryLayoutOnRanks) {
  LONGSPAN_NEEDS_GPU();
  const Cut cuts[] = {{Layout::contiguous},       {Layout::ranges},
                      {Layout::zigzag},           {Layout::striped},
                      {Layout::interleaved, 128}, {Layout::interleaved, 16},
                      {Layout::interleaved, 256}, {Layout::listed}};
  for (const DType dtype : {DType::bf16, DType::fp32})
    for (const Cut& cut : cuts)
      for (int ranks : {1, 2, 3, 4})
        for (int q_len : {5, 150})
          for (const Mask& mask : {Mask{.causal = true}, Mask{.window = 200, .right = 40}})
            check({.dtype = dtype,
                   .heads = 4,
                   .kv_heads = 2,
                   .dim = 64,
                   .q_lens = {q_len},
                   .kv_lens = {reduced(1111, 555)},
                   .mask = mask,
                   .layout = cut.layout,
                   .block = cut.block,
                   .ranks = ranks,
                   .invariant = ranks == 2,
                   .seed = fresh_seed()},
                  5);
}

TEST(Attend, UnevenBatches) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (int ranks : {1, 2, 4})
      for (Layout layout : {Layout::contiguous, Layout::striped, Layout::interleaved})
        check({.dtype = dtype,
               .heads = 6,
               .kv_heads = 2,
               .dim = 96,
               .q_lens = {1, 0, 33, 16, 17, 200, 4, 9},
               .kv_lens = {900, 50, 0, 16, 400, 130, 2, 0},
               .mask = {.causal = true},
               .layout = layout,
               .ranks = ranks,
               .sinks = ranks == 2,
               .seed = fresh_seed()},
              2);
}

/// More work tiles than blocks on a GPU, many of them empty: blocks take one after another.
TEST(Attend, ManySequences) {
  LONGSPAN_NEEDS_GPU();
  std::mt19937 rng(fresh_seed());
  for (const DType dtype : kTypes)
    for (bool invariant : {false, true}) {
      Case c{.dtype = dtype,
             .heads = 8,
             .kv_heads = 4,
             .dim = 64,
             .q_lens = {},
             .kv_lens = {},
             .mask = {.causal = true},
             .ranks = 3,
             .invariant = invariant,
             .seed = fresh_seed()};
      const int sequences = reduced(400, 40);
      for (int b = 0; b < sequences; ++b) {
        c.q_lens.push_back(static_cast<int>(rng() % 40));
        c.kv_lens.push_back(static_cast<int>(rng() % 300));
      }
      check(c, 7);
    }
}

TEST(Attend, MoreQueriesThanKeys) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes)
    for (int q_len : {9, 100})
      for (int kv_len : {0, 1, 5})
        for (bool sinks : {false, true})
          check({.dtype = dtype,
                 .dim = 32,
                 .q_lens = {q_len},
                 .kv_lens = {kv_len},
                 .mask = {.causal = true},
                 .ranks = 4,
                 .sinks = sinks,
                 .seed = fresh_seed()});
}

TEST(Attend, LongSequences) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : kTypes) {
    check({.dtype = dtype,
           .heads = 8,
           .kv_heads = 1,
           .dim = 128,
           .q_lens = {1},
           .kv_lens = {reduced(20000, 2000)},
           .ranks = 2,
           .seed = fresh_seed()});
    check({.dtype = dtype,
           .heads = 2,
           .kv_heads = 1,
           .dim = 128,
           .q_lens = {300},
           .kv_lens = {reduced(9000, 900)},
           .mask = {.causal = true},
           .ranks = 2,
           .seed = fresh_seed()},
          37);
  }
}

}  // namespace
}  // namespace longspan::test
