// The defects of other kernels, on the host.
#include <cstring>

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
#include "tests/support/defects.hpp"

namespace longspan::tests {
namespace {

TEST(Defects, ACacheOfMoreThan2To31Elements) {
  // 4 GiB of addresses, of which a few pages are touched.
  check_large_cache(DType::e4m3, false, [](std::byte* to, const std::vector<std::byte>& from) {
    std::memcpy(to, from.data(), from.size());
  });
}

}  // namespace
}  // namespace longspan::tests
