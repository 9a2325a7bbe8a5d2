// The acceptance grid of the merge on the host: a fixed part of it, or with LONGSPAN_FULL_GRID=1
// all of its 2,592 cases.
#include "tests/support/merge_grid.hpp"

#include <cstdlib>
#include <string_view>

namespace longspan::tests {

std::unique_ptr<kernels::Backend> make_backend() { return kernels::host_backend(2); }

namespace {

using MergeGrid = OnDevice;

TEST_F(MergeGrid, EveryCaseAgainstFloat64) {
  const char* all = std::getenv("LONGSPAN_FULL_GRID");
  const bool full = all != nullptr && std::string_view(all) == "1";
  int count = 0;
  for (DType dtype : {fp32, fp16, bf16}) {
    const std::int64_t most = full ? kMostElements : std::int64_t{613} * 16 * 256;
    std::vector<std::byte> pool = random_elements(dtype, 2 * most, random_());
    for (const GridCase& c : merge_grid()) {
      if (c.dtype != dtype) continue;
      const bool in_part = (c.tokens == 256 || c.tokens == 613) && (c.heads == 4 || c.heads == 16);
      if (!full && !in_part) continue;
      std::byte* prefix = pool.data() + below(most) * size_of(dtype);
      std::byte* suffix = pool.data() + below(most) * size_of(dtype);
      std::vector<float> lse = grid_lse(c, random_), out_lse(c.rows(), kNaN);
      std::vector<std::byte> out(c.size() * size_of(c.out()), std::byte{0xff});
      const float scale = GridCase::kScale;
      backend().merge_outputs(
          grid_params(c, prefix, suffix, lse.data(), out.data(), out_lse.data(), &scale), {});
      const std::string fault =
          grid_fault(c, {prefix, suffix, lse.data(), out.data(), out_lse.data()}, random_());
      ASSERT_EQ(fault, "");
      ++count;
    }
  }
  EXPECT_EQ(count, full ? 2592 : 288);
}

}  // namespace
}  // namespace longspan::tests
