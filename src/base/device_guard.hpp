// Makes a GPU the calling thread's current one, temporarily. Every public call that uses a GPU
// holds a guard, so that a caller's own choice (cudaSetDevice, torch.cuda.set_device) is neither
// needed nor lost.
#pragma once

#if defined(LONGSPAN_HAVE_CUDA)
#include <cuda_runtime_api.h>

#include "src/base/check.hpp"
#endif

namespace longspan {

/// Makes GPU `gpu` the calling thread's current one; below 0 it does nothing.
inline void set_current_gpu([[maybe_unused]] int gpu) {
#if defined(LONGSPAN_HAVE_CUDA)
  if (gpu >= 0) LONGSPAN_CUDA(cudaSetDevice(gpu));
#endif
}

/// The current GPU; -1 in a build without CUDA.
inline int current_gpu() {
  int gpu = -1;
#if defined(LONGSPAN_HAVE_CUDA)
  LONGSPAN_CUDA(cudaGetDevice(&gpu));
#endif
  return gpu;
}

class DeviceGuard {
 public:
  /// Makes GPU `gpu` current until the guard ends; below 0 it does nothing. It never throws, so
  /// destructors can hold one too: the calls that follow report what CUDA refuses here.
  explicit DeviceGuard([[maybe_unused]] int gpu) noexcept {
#if defined(LONGSPAN_HAVE_CUDA)
    if (gpu < 0 || !LONGSPAN_CUDA_WORKED(cudaGetDevice(&before_)) || before_ == gpu) return;
    moved_ = LONGSPAN_CUDA_WORKED(cudaSetDevice(gpu));
#endif
  }
  ~DeviceGuard() {
#if defined(LONGSPAN_HAVE_CUDA)
    if (moved_) static_cast<void>(LONGSPAN_CUDA_WORKED(cudaSetDevice(before_)));
#endif
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  [[maybe_unused]] int before_ = 0;
  [[maybe_unused]] bool moved_ = false;
};

}  // namespace longspan
