// Heads of all sizes, on the host.
#include "tests/support/serving_run.hpp"

namespace longspan::tests {
namespace {
constexpr Device kDevice = Device::host;
const kernels::Backend& backend() {
  static const std::unique_ptr<kernels::Backend> host = kernels::host_backend();
  return *host;
}
}  // namespace
}  // namespace longspan::tests

#define LONGSPAN_NEEDS_DEVICE() static_cast<void>(0)
#include "tests/support/head_dims.hpp"
