// The defects of other kernels, on a GPU.
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
#include "tests/support/defects.hpp"

namespace longspan::tests {
namespace {

TEST(Defects, ACacheOfMoreThan2To31Elements) {
  LONGSPAN_NEEDS_GPU();
  LONGSPAN_NEEDS_MORE_THAN_A_SIMULATOR("caches of 9 GB");
  for (DType dtype : {DType::bf16, DType::e4m3})
    for (bool x_packed : {false, true})
      check_large_cache(dtype, x_packed, [](std::byte* to, const std::vector<std::byte>& from) {
        ASSERT_EQ(cudaMemcpy(to, from.data(), from.size(), cudaMemcpyDefault), cudaSuccess);
      });
}

}  // namespace
}  // namespace longspan::tests
