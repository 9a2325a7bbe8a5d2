#include "comm/cuda/stream.hpp"

#include <fmt/format.h>

#include "longspan/error.hpp"
#include "src/base/check.hpp"

namespace longspan::comm {

std::string name_of_gpu(int gpu) {
  cudaDeviceProp properties{};
  LONGSPAN_CUDA(cudaGetDeviceProperties(&properties, gpu));
  return properties.name;
}

void check_gpu(int asked, int visible) {
  if (asked >= visible)
    throw UsageError(
        fmt::format("GPU {} was asked for; this process sees {}: 0 to {}, or below 0 for that of "
                    "the local rank",
                    asked, visible, visible - 1));
}

void copy_on(cudaStream_t stream, const void* from, void* to, std::size_t bytes) {
  if (from != to && bytes > 0)
    LONGSPAN_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream));
}

void wait_for_stream(cudaStream_t stream, Patience& patient, const std::function<void()>& look) {
  for (;;) {
    const cudaError_t status = cudaStreamQuery(stream);
    if (status != cudaErrorNotReady) {
      LONGSPAN_CUDA_STATUS(status, "cudaStreamQuery");
      return;
    }
    // Not an error, but CUDA may keep it as the last one.
    if (cudaPeekAtLastError() == cudaErrorNotReady) static_cast<void>(cudaGetLastError());
    look();
    patient.pause();
  }
}

}  // namespace longspan::comm
