// Implements Buffer, and copies to the host, on the host and, in a build with CUDA, on the current
// GPU.
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "kernels/read_back.hpp"
#include "longspan/buffer.hpp"
#include "longspan/error.hpp"
#include "src/base/device_guard.hpp"

namespace longspan {
namespace {

constexpr std::size_t kAlign = 256;  // bytes; cudaMalloc gives at least this

void* allocate(Device device, std::size_t bytes) {
  void* data = nullptr;
  if (device == Device::host) {
    if (bytes <= std::numeric_limits<std::size_t>::max() - kAlign)  // otherwise rounding up gives 0
      data = std::aligned_alloc(kAlign, (bytes + kAlign - 1) / kAlign * kAlign);
    if (data == nullptr)
      throw BackendError("asked for " + std::to_string(bytes) +
                         " bytes of host memory and there are not so many: use smaller tensors");
    return data;
  }
#if defined(LONGSPAN_HAVE_CUDA)
  const cudaError_t status = cudaMalloc(&data, bytes);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // this error is reported here and must not stay the GPU's last error
    std::size_t free = 0, total = 0;
    static_cast<void>(LONGSPAN_CUDA_WORKED(cudaMemGetInfo(&free, &total)));
    throw BackendError("asked for " + std::to_string(bytes) + " bytes of GPU memory and " +
                       std::to_string(free) + " are free: use smaller tensors or more ranks");
  }
  LONGSPAN_CUDA_STATUS(status, "cudaMalloc");
  return data;
#else
  throw Unsupported(
      "memory on cuda: this longspan was built without CUDA: rebuild with -DLONGSPAN_CUDA=ON");
#endif
}

void release(Device device, void* data) {
  if (device == Device::host) std::free(data);
#if defined(LONGSPAN_HAVE_CUDA)
  if (device == Device::cuda) static_cast<void>(LONGSPAN_CUDA_WORKED(cudaFree(data)));
#endif
}

void check_host(const void* host, std::size_t bytes) {
  if (host == nullptr && bytes > 0)
    throw InputError("host memory for a copy of " + std::to_string(bytes) + " bytes is null");
}

void copy(Device device, void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  if (device == Device::host) std::memcpy(to, from, bytes);
#if defined(LONGSPAN_HAVE_CUDA)
  if (device == Device::cuda) {
    LONGSPAN_CUDA(cudaMemcpy(to, from, bytes, cudaMemcpyDefault));
    // From pageable memory the call returns before the bytes have arrived, and streams that do not
    // wait for the default one would read too early.
    LONGSPAN_CUDA(cudaStreamSynchronize(nullptr));
  }
#endif
}

}  // namespace

Buffer::Buffer(Device device, std::size_t bytes) : bytes_(bytes), device_(device) {
  if (bytes == 0) return;
  data_ = allocate(device, bytes);
  if (device == Device::cuda) gpu_ = current_gpu();
}

Buffer::~Buffer() {
  if (data_ != nullptr) release(device_, data_);
}

Buffer::Buffer(Buffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      device_(other.device_),
      gpu_(other.gpu_) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(device_, other.device_);
  std::swap(gpu_, other.gpu_);
  return *this;
}

void Buffer::upload(const void* host) {
  check_host(host, bytes_);
  const DeviceGuard guard(gpu_);
  copy(device_, data_, host, bytes_);
}

void Buffer::download(void* host) const {
  check_host(host, bytes_);
  const DeviceGuard guard(gpu_);
  copy(device_, host, data_, bytes_);
}

bool is_captured([[maybe_unused]] Device device, [[maybe_unused]] Stream stream) {
#if defined(LONGSPAN_HAVE_CUDA)
  if (device == Device::cuda) {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    LONGSPAN_CUDA(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream.handle), &capture));
    return capture != cudaStreamCaptureStatusNone;
  }
#endif
  return false;
}

void read_back(Device device, const void* from, std::size_t bytes, void* to) {
  copy(device, to, from, bytes);
}

}  // namespace longspan
