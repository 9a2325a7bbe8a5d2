// Caught errors, and the caller's own errors, do not end the next run: launches report their own
// status (kernels/cuda/common/launch.hpp), and a thrown error does not stay behind.
#include "longspan/error.hpp"
#include "tests/gpu/gpu_judge.hpp"

namespace longspan::test {
namespace {

const Case kDecode{.q_lens = {1}, .kv_lens = {2000}, .mask = {.causal = true}};
const Case kPrefill{.q_lens = {200}, .kv_lens = {2000}, .mask = {.causal = true}};

TEST(LastError, OfACaughtFailureIsGone) {
  LONGSPAN_NEEDS_GPU();
  EXPECT_THROW(Buffer(Device::cuda, std::size_t{1} << 50), BackendError);
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
  for (const Case& c : {kDecode, kPrefill}) {
    const Data data(c);
    GpuRun run(c, data);
    expect_exact(c, data, run.run());
  }
}

TEST(LastError, OfTheCallerIsNotOurs) {
  LONGSPAN_NEEDS_GPU();
  for (const Case& c : {kDecode, kPrefill}) {
    const Data data(c);
    GpuRun run(c, data);
    run.poison();
    ASSERT_NE(cudaSetDevice(-1), cudaSuccess);
    EXPECT_NO_THROW(run.queue());
    // It may be gone: a successful cudaFuncSetAttribute clears it (CUDA 13.0).
    static_cast<void>(cudaGetLastError());
    expect_exact(c, data, run.result());
  }
}

}  // namespace
}  // namespace longspan::test
