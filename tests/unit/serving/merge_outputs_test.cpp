// The merge of finished outputs on the host.
#include "tests/support/merge_outputs_tests.hpp"

#include <sys/mman.h>

namespace longspan::tests {

std::unique_ptr<kernels::Backend> make_backend() { return kernels::host_backend(2); }

namespace {

/// Rows 2^30 elements apart, in memory of which only the rows themselves exist.
TEST_F(MergeOutputs, OffsetsOfMoreThan32Bits) {
  constexpr std::int64_t kStride = std::int64_t{1} << 30, kTokens = 5, kDim = 16;
  constexpr std::size_t kBytes = (kTokens - 1) * kStride * 4 + 4096;
  std::array<float*, 3> memory;  // prefix, suffix, out
  for (float*& m : memory) {
    void* at = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) GTEST_SKIP() << "no address space for " << kBytes << " sparse bytes";
    m = static_cast<float*>(at);
  }
  for (std::int64_t token = 0; token < kTokens; ++token)
    for (int d = 0; d < kDim; ++d)
      for (int side : {0, 1}) memory[side][token * kStride + d] = normal();
  std::vector<float> lse(2 * kTokens), out_lse(kTokens, kNaN);
  for (float& x : lse) x = normal();
  kernels::MergeOutputsParams p;
  for (int side : {0, 1}) {
    p.in[side] = {memory[side], kStride, kDim};
    p.in_lse[side] = {lse.data() + side * kTokens, 1, 1};
  }
  p.tokens = kTokens;
  p.dim = kDim;
  p.out = {memory[2], kStride, kDim};
  p.lse = {out_lse.data(), 1, 1};
  backend().merge_outputs(p, {});
  for (std::int64_t token = 0; token < kTokens; ++token) {
    const double a = std::exp(double{lse[token]}), b = std::exp(double{lse[kTokens + token]});
    for (int d = 0; d < kDim; ++d) {
      const std::int64_t at = token * kStride + d;
      EXPECT_NEAR(memory[2][at], (a * memory[0][at] + b * memory[1][at]) / (a + b), 1e-5);
    }
  }
  for (float* m : memory) munmap(m, kBytes);
}

}  // namespace
}  // namespace longspan::tests
