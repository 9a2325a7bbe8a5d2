// Stands in place of the CUDA backend in a build without CUDA.
#if !defined(LONGSPAN_HAVE_CUDA)

#include "kernels/backend.hpp"
#include "longspan/error.hpp"

namespace longspan::kernels {

std::unique_ptr<Backend> cuda_backend() {
  throw Unsupported(
      "device cuda: this longspan was built without CUDA: rebuild with -DLONGSPAN_CUDA=ON");
}

}  // namespace longspan::kernels

#endif
