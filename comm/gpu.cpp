// Makes the transport of GPUs, or refuses in a program without GPU support: built without CUDA, or
// linked without longspan::nccl.
#include "comm/gpu.hpp"

#include "comm/libraries.hpp"
#include "longspan/error.hpp"

namespace longspan::comm {

#if defined(LONGSPAN_HAVE_CUDA)

std::shared_ptr<Transport> gpu_transport(std::shared_ptr<Control> control, int gpu) {
  if (nccl_library() == nullptr)
    throw Unsupported(
        "Device cuda was asked for among several ranks, whose states travel over NCCL, but this "
        "program was linked without it: link longspan::nccl, or use device host.");
  return nccl_library()->connect(std::move(control), gpu);
}

#else

namespace {

[[noreturn]] void refuse() {
  throw Unsupported(
      "Device cuda was asked for, but longspan was built without CUDA: configure with "
      "-DLONGSPAN_CUDA=ON, or use device host.");
}

}  // namespace

std::shared_ptr<Transport> gpu_transport(std::shared_ptr<Control>, int) { refuse(); }
std::shared_ptr<Transport> gpu_self(milliseconds, int) { refuse(); }

#endif

}  // namespace longspan::comm
