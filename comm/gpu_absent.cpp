// What a build without CUDA says.
#if !defined(LONGSPAN_HAVE_CUDA)

#include "comm/gpu.hpp"
#include "longspan/error.hpp"

namespace longspan::comm {
namespace {

[[noreturn]] void refuse() {
  throw Unsupported(
      "Device cuda was asked for, but longspan was built without CUDA: configure with "
      "-DLONGSPAN_CUDA=ON, or use device host.");
}

}  // namespace

std::shared_ptr<Transport> gpu_transport(std::shared_ptr<Control>, int) { refuse(); }
std::shared_ptr<Transport> gpu_self(milliseconds, int) { refuse(); }

}  // namespace longspan::comm

#endif
