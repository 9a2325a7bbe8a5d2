// The merge of finished outputs on a GPU.
#include "tests/support/merge_outputs_tests.hpp"

#include <cuda_runtime_api.h>

#include "tests/gpu/gpu_case.hpp"

namespace longspan::tests {

std::unique_ptr<kernels::Backend> make_backend() {
  int gpus = 0;
  if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0) return nullptr;
  return kernels::cuda_backend();
}

namespace {

/// More than 2^31 elements in each tensor; the rows at both ends and around 2^31 are checked.
TEST_F(MergeOutputs, OffsetsOfMoreThan32Bits) {
  LONGSPAN_NEEDS_MORE_THAN_A_SIMULATOR("tensors of 13 GB");
  constexpr std::int64_t kTokens = 524'388, kHeads = 32, kDim = 128;
  constexpr std::int64_t kRow = kHeads * kDim, kSize = kTokens * kRow;
  static_assert(kSize > std::int64_t{1} << 31);
  std::size_t free = 0, total = 0;
  ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  if (free < 3 * kSize * 2 + (std::size_t{1} << 30)) GTEST_SKIP() << "too little GPU memory";
  const test::OnGpu<std::uint16_t> prefix(kSize), suffix(kSize), out(kSize);
  const test::OnGpu<float> lse(2 * kTokens * kHeads), out_lse(kTokens * kHeads);
  ASSERT_EQ(cudaMemset(lse.data(), 0, 2 * kTokens * kHeads * sizeof(float)), cudaSuccess);
  const std::int64_t looked_at[] = {0, 1, 524'287, 524'288, 524'289, kTokens - 1};
  std::vector<std::vector<std::uint16_t>> parts[2];
  for (std::int64_t token : looked_at)
    for (int side : {0, 1}) {
      std::vector<std::uint16_t> row(kRow);
      for (std::int64_t i = 0; i < kRow; ++i) store_element(row.data(), bf16, i, normal());
      std::uint16_t* to = (side == 0 ? prefix : suffix).data() + token * kRow;
      ASSERT_EQ(cudaMemcpy(to, row.data(), kRow * 2, cudaMemcpyDefault), cudaSuccess);
      parts[side].push_back(std::move(row));
    }
  kernels::MergeOutputsParams p;
  p.in_dtype[0] = p.in_dtype[1] = p.dtype = bf16;
  p.in[0] = {prefix.data(), kRow, kDim};
  p.in[1] = {suffix.data(), kRow, kDim};
  p.in_lse[0] = {lse.data(), 1, kTokens};
  p.in_lse[1] = {lse.data() + kTokens * kHeads, 1, kTokens};
  p.tokens = kTokens;
  p.heads = kHeads;
  p.dim = kDim;
  p.out = {out.data(), kRow, kDim};
  p.lse = {out_lse.data(), 1, kTokens};
  backend().merge_outputs(p, {});
  for (std::size_t n = 0; n < std::size(looked_at); ++n) {
    std::vector<std::uint16_t> got(kRow);
    ASSERT_EQ(cudaMemcpy(got.data(), out.data() + looked_at[n] * kRow, kRow * 2, cudaMemcpyDefault),
              cudaSuccess);
    for (std::int64_t i = 0; i < kRow; ++i) {
      const double mean = (double{load_element(parts[0][n].data(), bf16, i)} +
                           double{load_element(parts[1][n].data(), bf16, i)}) /
                          2;
      ASSERT_NEAR(load_element(got.data(), bf16, i), mean, one_rounding(bf16, mean, 1))
          << "token " << looked_at[n] << " element " << i;
    }
  }
}

/// Parts that were gathered in different runs: nothing is written, and the rank that differs is
/// reported.
TEST_F(MergeOutputs, PartsOfDifferentRunsAreNotMerged) {
  for (const int parts : {2, 3})
    for (const int dim : {64, 5})
      for (const int differs : {-1, 0, parts - 1}) {
        const OutputsCase c{.tokens = 40, .dim = dim, .parts = parts};
        const OutputsData data = make(c, 0);
        const auto in = on_device(data.out);
        const auto lse = on_device(data.lse);
        const auto out = poisoned<float>(static_cast<std::size_t>(c.size()));
        const auto out_lse = poisoned<float>(static_cast<std::size_t>(c.rows()));
        std::vector<std::uint64_t> words(parts, 77);
        if (differs >= 0) words[differs] = 78;
        const auto digests = on_device(words);
        const auto shared = backend().shared_memory(sizeof(std::uint64_t));
        auto* const report = reinterpret_cast<std::uint64_t*>(shared.get());
        kernels::MergeOutputsParams p;
        p.parts = parts;
        for (int n = 0; n < std::min(parts, 2); ++n) {
          p.in[n] = {in.data() + c.part_at(n), c.row_stride(), c.head_stride()};
          p.in_lse[n] = {lse.data() + n * c.rows(), c.heads, 1};
        }
        p.part_stride = c.size();
        p.lse_part_stride = c.rows();
        p.tokens = c.tokens;
        p.heads = c.heads;
        p.dim = c.dim;
        p.out = {out.data(), c.row_stride(), c.head_stride()};
        p.lse = {out_lse.data(), c.heads, 1};
        p.headers = {digests.data(), 1, parts, 9, report};
        backend().merge_outputs(p, {});
        const std::vector<float> got = out.values(), logs = out_lse.values();
        // Rank 1 checks: where its own word is the other one, rank 0 is the one that differs.
        const int other = differs == 1 ? 0 : differs;
        EXPECT_EQ(*report, differs < 0 ? 0 : kernels::RunHeaders::reported(9, other));
        for (const std::vector<float>& values : {got, logs})
          for (const float value : values) ASSERT_EQ(std::isnan(value), differs >= 0) << c;
      }
}

}  // namespace
}  // namespace longspan::tests
