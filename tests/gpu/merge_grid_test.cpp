// The acceptance grid of the merge on a GPU, all 2,592 cases.
#include "tests/support/merge_grid.hpp"

#include <cuda_runtime_api.h>

#include "tests/gpu/gpu_case.hpp"

namespace longspan::tests {

std::unique_ptr<kernels::Backend> make_backend() {
  int gpus = 0;
  if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0) return nullptr;
  return kernels::cuda_backend();
}

namespace {

using test::OnGpu;

class MergeGrid : public OnDevice {
 protected:
  /// Parts start at random multiples of `step` elements: of one, they are not aligned to 16 bytes.
  void run(const GridCase& c, std::int64_t step, const std::vector<std::byte>& pool,
           const OnGpu<std::byte>& gpu_pool, OnGpu<std::byte>& out, const OnGpu<float>& scale) {
    const std::int64_t places =
        static_cast<std::int64_t>(pool.size() / size_of(c.dtype)) / 2 / step;
    const std::size_t prefix = below(places) * step * size_of(c.dtype);
    const std::size_t suffix = below(places) * step * size_of(c.dtype);
    const std::vector<float> lse = grid_lse(c, random_);
    const OnGpu<float> gpu_lse(lse), out_lse(static_cast<std::size_t>(c.rows()));
    const std::size_t bytes = static_cast<std::size_t>(c.size()) * size_of(c.out());
    ASSERT_EQ(cudaMemset(out.data(), 0xff, bytes), cudaSuccess);
    backend().merge_outputs(grid_params(c, gpu_pool.data() + prefix, gpu_pool.data() + suffix,
                                        gpu_lse.data(), out.data(), out_lse.data(), scale.data()),
                            {});
    const std::vector<std::byte> got = out.values(bytes);
    const std::vector<float> got_lse = out_lse.values(static_cast<std::size_t>(c.rows()));
    const std::string fault = grid_fault(
        c, {pool.data() + prefix, pool.data() + suffix, lse.data(), got.data(), got_lse.data()},
        random_());
    ASSERT_EQ(fault, "");
  }
};

TEST_F(MergeGrid, EveryCaseAgainstFloat64) {
  // In the simulator those of up to a hundredth of the largest one's elements.
  const std::int64_t most = tests::reduced(kMostElements, kMostElements / 100);
  const std::vector<GridCase> grid = merge_grid();
  const OnGpu<float> scale(std::vector<float>{GridCase::kScale});
  OnGpu<std::byte> out(static_cast<std::size_t>(most) * sizeof(float));
  int count = 0;
  for (DType dtype : {fp32, fp16, bf16}) {
    const std::vector<std::byte> pool = random_elements(dtype, 2 * most, random_());
    const OnGpu<std::byte> gpu_pool(pool);
    for (const GridCase& c : grid) {
      if (c.dtype != dtype || c.size() > most || is_left_out(2 * c.size())) continue;
      run(c, 8, pool, gpu_pool, out, scale);
      if (c.tokens == 613) run(c, 1, pool, gpu_pool, out, scale);
      if (HasFatalFailure()) return;
      ++count;
    }
  }
  if (!tests::reduction()) {
    EXPECT_EQ(count, 2592);
  }
}

}  // namespace
}  // namespace longspan::tests
