// Heads of all sizes, on a GPU.
#include "tests/gpu/gpu_case.hpp"
#include "tests/support/serving_run.hpp"

namespace longspan::tests {
namespace {
constexpr Device kDevice = Device::cuda;
const kernels::Backend& backend() {
  static const std::unique_ptr<kernels::Backend> cuda = kernels::cuda_backend();
  return *cuda;
}
}  // namespace
}  // namespace longspan::tests

#define LONGSPAN_NEEDS_DEVICE() LONGSPAN_NEEDS_GPU()
#include "tests/support/head_dims.hpp"
