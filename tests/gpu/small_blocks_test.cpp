// Attention on a GPU whose thread blocks may have 99 KB of shared memory, as on 8.6, 8.9 and 12.0:
// any GPU, with that limit set. Instances that need more must be replaced by ones that fit
// (kernels/cuda/dispatch/instances.hpp), with equally exact results.
#include "kernels/cuda/dispatch/attend.hpp"
#include "kernels/cuda/dispatch/families.hpp"
#include "longspan/error.hpp"
#include "tests/gpu/gpu_judge.hpp"

namespace longspan::test {
namespace {

namespace cuda = kernels::cuda;

cuda::Gpu gpu_with(int block_bytes) {
  cuda::Gpu gpu = cuda::current_gpu();
  gpu.block_bytes = block_bytes;
  return gpu;
}

void check_small(const Case& c, bool tf32 = false, cuda::Gpu gpu = gpu_with(99 * 1024)) {
  if (is_left_out(work_of(c))) return;
  SCOPED_TRACE(::testing::Message() << c << " tf32 " << tf32);
  const Data data(c);
  GpuRun run(c, data);
  run.poison();
  for (int rank = 0; rank < c.ranks; ++rank) {
    kernels::AttendParams p = run.params(rank);
    p.tf32 = tf32;
    cuda::check(p, gpu);
    const OnGpu<std::byte> scratch(cuda::scratch_bytes(p, gpu));
    EXPECT_LE(scratch.buffer.bytes(), std::max<std::size_t>(cuda::scratch_bound(p, gpu), 1));
    p.scratch = scratch.data();
    p.scratch_bytes = scratch.buffer.bytes();
    cuda::attend(p, gpu, nullptr);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
  run.queue_merge();
  expect_exact(c, data, run.result());
}

TEST(SmallBlocks, EveryHeadDim) {
  LONGSPAN_NEEDS_GPU();
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32})
    for (const int dim : {128, 136, 192, 200, 256})
      for (const int q_len : {1, 3, 16, 40, 150})
        for (const bool invariant : {true, false})  // Hopper's kernel has no cap in the fixed order
          check_small({.dtype = dtype,
                       .heads = 6,
                       .kv_heads = 2,
                       .dim = dim,
                       .q_lens = {q_len},
                       .kv_lens = {700},
                       .mask = {.causal = true},
                       .softcap = invariant ? 30.0f : 0.0f,
                       .ranks = 2,
                       .invariant = invariant,
                       .seed = fresh_seed()});
}

TEST(SmallBlocks, Tf32TakesTrueFp32) {
  LONGSPAN_NEEDS_GPU();
  for (const int q_len : {3, 40})
    check_small({.dtype = DType::fp32,
                 .dim = 256,
                 .q_lens = {q_len},
                 .kv_lens = {333},
                 .mask = {.causal = true},
                 .seed = fresh_seed()},
                true);
}

/// The host's part with code that was compiled for 8.0: no boxes, no overlap.
TEST(SmallBlocks, DecodeWithoutTheCopyEngine) {
  LONGSPAN_NEEDS_GPU();
  int most = 0;
  ASSERT_EQ(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0), cudaSuccess);
  cuda::Gpu gpu = gpu_with(most);
  gpu.sm90_code = false;
  for (const DType dtype : {DType::bf16, DType::fp16})
    for (const int dim : {64, 128, 256})
      for (const int q_len : {1, 4})
        check_small({.dtype = dtype,
                     .heads = 8,
                     .kv_heads = 2,
                     .dim = dim,
                     .q_lens = {q_len},
                     .kv_lens = {reduced(3000, 1000)},
                     .mask = {.causal = true},
                     .ranks = 2,
                     .seed = fresh_seed()},
                    false, gpu);
}

TEST(SmallBlocks, WhereNothingFitsTheGpuIsRefusedByName) {
  LONGSPAN_NEEDS_GPU();
  kernels::AttendParams p = Case{.dim = 256, .q_lens = {40}}.params();
  try {
    cuda::check(p, gpu_with(64 * 1024));
    ADD_FAILURE() << "nothing was refused";
  } catch (const Unsupported& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("head_dim 256"), std::string::npos) << text;
    EXPECT_NE(text.find("65536 bytes of shared memory"), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace longspan::test
