// Segmented attention over a paged cache on a GPU: the peers' grid in full.
#include "tests/gpu/gpu_case.hpp"
#include "tests/support/grids.hpp"

namespace longspan::tests {
namespace {

TEST(UnifiedGrid, Main) {
  LONGSPAN_NEEDS_GPU();
  const ServingOps kernels(Device::cuda);
  run_grid(Device::cuda, unified_grid(), 1, [&](const UnifiedCase& c, std::uint64_t seed) {
    run_unified(kernels, Device::cuda, c, seed);
  });
}

TEST(UnifiedGrid, ManyPages) {  // 32768 pages of 16 keys, drawn with repetition
  LONGSPAN_NEEDS_GPU();
  const ServingOps kernels(Device::cuda);
  for (std::size_t i : {0, 130, 270}) {
    UnifiedCase c = unified_grid()[i];
    if (is_left_out(work_of(c.shape))) continue;
    c.shape.pool = reduced(32768, 600);
    run_unified(kernels, Device::cuda, c, 5000 + i);
  }
}

TEST(UnifiedGrid, Extras) {
  LONGSPAN_NEEDS_GPU();
  const ServingOps kernels(Device::cuda);
  run_grid(Device::cuda, unified_extras(), 1, [&](const UnifiedCase& c, std::uint64_t seed) {
    run_unified(kernels, Device::cuda, c, seed);
  });
}

}  // namespace
}  // namespace longspan::tests
