// Replaces the CUDA backend in a build without CUDA.
#if !defined(LONGSPAN_HAVE_CUDA)

#include "kernels/backend.hpp"
#include "kernels/cuda/dispatch/families.hpp"
#include "longspan/error.hpp"

namespace longspan::kernels {
namespace {

[[noreturn]] void refuse() {
  throw Unsupported(
      "device cuda: this longspan was built without CUDA: rebuild with -DLONGSPAN_CUDA=ON");
}

}  // namespace

std::unique_ptr<Backend> cuda_backend() { refuse(); }

// The table of the families is in every build, for display.
namespace cuda {

bool attend_hopper(const AttendParams&, const Kind&, const MergeParams*, Stream) { refuse(); }
bool attend_planned(Family, const AttendParams&, const Kind&, const MergeParams*, Stream) {
  refuse();
}

}  // namespace cuda
}  // namespace longspan::kernels

#endif
