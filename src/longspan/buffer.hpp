// Memory on a device, owned: for callers without an allocator of their own (the command, tests,
// examples). A layer keeps its workspace in one.
#pragma once

#include <cstddef>

#include "longspan/types.hpp"

namespace longspan {

class Buffer {
 public:
  Buffer() = default;
  /// `bytes` of uninitialised memory, aligned to 256 bytes, on the host or the current GPU, which
  /// it belongs to from then on. BackendError when there is not enough, Unsupported in a build
  /// without CUDA.
  Buffer(Device device, std::size_t bytes);
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;

  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  Device device() const { return device_; }

  /// Blocking copies of bytes() from and to host memory. InputError for a null pointer.
  void upload(const void* host);
  void download(void* host) const;

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
  Device device_ = Device::host;
  int gpu_ = -1;
};

}  // namespace longspan
