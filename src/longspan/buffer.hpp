/// \file
/// Owned memory on a device, for callers without an allocator of their own (the command, tests,
/// examples). A layer keeps its workspace in one.
#pragma once

#include <cstddef>

#include "longspan/types.hpp"

namespace longspan {

/// Owns memory on one device: movable, not copyable, freed in the destructor.
class Buffer {
 public:
  /// No memory.
  Buffer() = default;
  /// `bytes` of uninitialised memory, aligned to 256 bytes, on the host or on the current GPU.
  /// BackendError if there is not enough, Unsupported in a build without CUDA.
  Buffer(Device device, std::size_t bytes);
  ~Buffer();
  /// Takes over the memory of `other`, which is then empty.
  Buffer(Buffer&& other) noexcept;
  /// The same; frees what this object had.
  Buffer& operator=(Buffer&& other) noexcept;

  /// The first byte, on device(); null without memory.
  void* data() const { return data_; }
  /// The size in bytes.
  std::size_t bytes() const { return bytes_; }
  /// The device of the memory.
  Device device() const { return device_; }

  /// Copies bytes() from host memory and blocks. InputError for a null pointer.
  void upload(const void* host);
  /// Copies bytes() to host memory and blocks. InputError for a null pointer.
  void download(void* host) const;

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
  Device device_ = Device::host;
  int gpu_ = -1;
};

}  // namespace longspan
