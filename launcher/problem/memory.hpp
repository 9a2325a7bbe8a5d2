// Makes device memory with contents, for hosts that have them or can write them.
#pragma once

#include <cstring>
#include <vector>

#include "longspan/buffer.hpp"
#include "longspan/tensor.hpp"

namespace longspan::launcher {

template <class T>
Buffer on_device(Device device, const std::vector<T>& values) {
  Buffer buffer(device, values.size() * sizeof(T));
  if (!values.empty()) buffer.upload(values.data());
  return buffer;
}

/// Views all of a buffer as an array of T; no array where it is empty.
template <class T>
Tensor array(const Buffer& buffer, Device device) {
  if (buffer.bytes() == 0) return {};
  return {static_cast<const T*>(buffer.data()),
          {static_cast<std::int64_t>(buffer.bytes() / sizeof(T))},
          device};
}

/// Has `fill` write device memory as if it were host memory.
template <class Fill>
void refill(Device device, Buffer& buffer, const Fill& fill) {
  if (device == Device::host) {
    fill(static_cast<std::byte*>(buffer.data()));
  } else if (buffer.bytes() > 0) {
    std::vector<std::byte> staging(buffer.bytes());
    fill(staging.data());
    buffer.upload(staging.data());
  }
}

/// Makes device memory that `fill` writes as if it were host memory.
template <class Fill>
Buffer filled(Device device, std::size_t bytes, const Fill& fill) {
  Buffer buffer(device, bytes);
  refill(device, buffer, fill);
  return buffer;
}

/// Sets all bits of device memory: a NaN in every dtype.
inline void poison(Device device, Buffer& buffer) {
  refill(device, buffer, [&](std::byte* to) {
    if (buffer.bytes() > 0) std::memset(to, 0xff, buffer.bytes());
  });
}

inline Buffer poisoned(Device device, std::size_t bytes) {
  Buffer buffer(device, bytes);
  poison(device, buffer);
  return buffer;
}

}  // namespace longspan::launcher
