// Decode over 2 and 4 simulated ranks on one GPU: the peers' context-parallel grid.
#include "tests/gpu/gpu_case.hpp"
#include "tests/support/context_parallel.hpp"

namespace longspan::tests {
namespace {

TEST(ContextParallelGrid, SimulatedRanks) {
  LONGSPAN_NEEDS_GPU();
  const auto backend = kernels::cuda_backend();
  run_grid(Device::cuda, context_parallel_grid(), 1,
           [&](const ContextParallelCase& c, std::uint64_t seed) {
             run_context_parallel(*backend, c, seed);
           });
}

TEST(ContextParallelGrid, MergeOfParts) {
  LONGSPAN_NEEDS_GPU();
  const ServingOps kernels(Device::cuda);
  for (const PartsCase& c : parts_cases())
    for (DType dtype : {DType::fp32, DType::fp16, DType::bf16})
      for (LogBase base : {LogBase::e, LogBase::two})
        run_parts(kernels, Device::cuda, c, dtype, base, 11);
}

}  // namespace
}  // namespace longspan::tests
