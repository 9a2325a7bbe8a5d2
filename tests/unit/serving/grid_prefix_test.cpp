// Chunked prefill on the host: a fixed part of the peers' grid, its lengths cut to 160.
#include "tests/support/grids.hpp"

namespace longspan::tests {
namespace {

TEST(PrefixGrid, Main) {
  const ServingOps kernels(Device::host);
  const std::int32_t longest = step_of_grid(Device::host, 2) == 1 ? 1024 : 160;
  run_grid(Device::host, prefix_grid(longest), 17, [&](const PrefixCase& c, std::uint64_t seed) {
    run_prefix(kernels, Device::host, c, seed);
  });
}

TEST(PrefixGrid, Extras) {
  const ServingOps kernels(Device::host);
  run_grid(Device::host, prefix_extras(), 1, [&](const PrefixCase& c, std::uint64_t seed) {
    run_prefix(kernels, Device::host, c, seed);
  });
}

}  // namespace
}  // namespace longspan::tests
