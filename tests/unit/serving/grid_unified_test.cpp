// Segmented attention over a paged cache on the host: a fixed part of the peers' grid.
#include "tests/support/grids.hpp"

namespace longspan::tests {
namespace {

TEST(UnifiedGrid, Main) {
  const ServingOps kernels(Device::host);
  run_grid(Device::host, unified_grid(), 5, [&](const UnifiedCase& c, std::uint64_t seed) {
    run_unified(kernels, Device::host, c, seed);
  });
}

TEST(UnifiedGrid, Extras) {
  const ServingOps kernels(Device::host);
  run_grid(Device::host, unified_extras(), 1, [&](const UnifiedCase& c, std::uint64_t seed) {
    run_unified(kernels, Device::host, c, seed);
  });
}

}  // namespace
}  // namespace longspan::tests
