/// \file
/// Memory on a device, owned: for callers without an allocator of their own (the command, tests,
/// examples). A layer keeps its workspace in one.
#pragma once

#include <cstddef>

#include "longspan/types.hpp"

namespace longspan {

/// Memory of its own on one device; it is moved, not copied, and freed at the end.
class Buffer {
 public:
  /// No memory.
  Buffer() = default;
  /// `bytes` of uninitialised memory, aligned to 256 bytes, on the host or the current GPU, which
  /// it belongs to from then on. BackendError when there is not enough, Unsupported in a build
  /// without CUDA.
  Buffer(Device device, std::size_t bytes);
  ~Buffer();
  /// Takes the memory of `other`, which has none afterwards.
  Buffer(Buffer&& other) noexcept;
  /// The same; what it had is freed.
  Buffer& operator=(Buffer&& other) noexcept;

  /// The first byte, on device(); null where there is no memory.
  void* data() const { return data_; }
  /// How many there are.
  std::size_t bytes() const { return bytes_; }
  /// Where they lie.
  Device device() const { return device_; }

  /// A blocking copy of bytes() from host memory. InputError for a null pointer.
  void upload(const void* host);
  /// A blocking copy of bytes() to host memory. InputError for a null pointer.
  void download(void* host) const;

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
  Device device_ = Device::host;
  int gpu_ = -1;
};

}  // namespace longspan
