// Decode over 2 and 4 simulated ranks on the host: the peers' context-parallel grid.
#include "tests/support/context_parallel.hpp"

namespace longspan::tests {
namespace {

TEST(ContextParallelGrid, SimulatedRanks) {
  const auto backend = kernels::host_backend();
  run_grid(Device::host, context_parallel_grid(), 1,
           [&](const ContextParallelCase& c, std::uint64_t seed) {
             run_context_parallel(*backend, c, seed);
           });
}

TEST(ContextParallelGrid, MergeOfParts) {
  const ServingOps kernels(Device::host);
  for (const PartsCase& c : parts_cases())
    for (DType dtype : {DType::fp32, DType::fp16, DType::bf16})
      for (LogBase base : {LogBase::e, LogBase::two})
        run_parts(kernels, Device::host, c, dtype, base, 11);
}

}  // namespace
}  // namespace longspan::tests
