// Chunked prefill on a GPU: the peers' grid in full.
#include "tests/gpu/gpu_case.hpp"
#include "tests/support/grids.hpp"

namespace longspan::tests {
namespace {

TEST(PrefixGrid, Main) {
  LONGSPAN_NEEDS_GPU();
  const ServingOps kernels(Device::cuda);
  run_grid(
      Device::cuda, prefix_grid(reduced(1024, 48), reduced(64, 8)), 1,
      [&](const PrefixCase& c, std::uint64_t seed) { run_prefix(kernels, Device::cuda, c, seed); });
}

TEST(PrefixGrid, Extras) {
  LONGSPAN_NEEDS_GPU();
  const ServingOps kernels(Device::cuda);
  run_grid(Device::cuda, prefix_extras(), 1, [&](const PrefixCase& c, std::uint64_t seed) {
    run_prefix(kernels, Device::cuda, c, seed);
  });
}

}  // namespace
}  // namespace longspan::tests
