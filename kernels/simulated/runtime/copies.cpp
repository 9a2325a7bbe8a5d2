// Copies and fills, as operations of streams. The host waits only for those that the runtime's
// manual lists ("API synchronization behavior"), so that code that relies on more is found out.
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/simulated/runtime/memory.hpp"
#include "kernels/simulated/runtime/streams.hpp"
#include "kernels/simulated/runtime/waiting.hpp"

namespace longspan::simulated {
namespace {

constexpr std::size_t kMostStaged = 64 << 10;  // most bytes that a copy may stage without a wait

/// One end of a copy.
struct End {
  bool is_good = true;       // inside of an allocation, or the host's own
  bool is_on_gpu = false;    // pinned memory is the host's
  bool is_pageable = false;  // the host's, and not pinned
};

End end_of(const void* data, std::size_t bytes) {
  const Found found = look_up(data, bytes);
  if (found.where == Where::outside || data == nullptr) return {.is_good = false};
  if (found.where == Where::elsewhere) return {.is_pageable = true};
  return {.is_on_gpu = found.allocation->kind != Allocation::Kind::host};
}

struct Copy {
  End to, from;
};

/// Success: the ends are on the sides that `kind` names.
cudaError_t check(const Copy& copy, cudaMemcpyKind kind) {
  if (!copy.to.is_good || !copy.from.is_good) return cudaErrorInvalidValue;
  const bool wants_gpu_to = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool wants_gpu_from = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  if (kind == cudaMemcpyDefault) return cudaSuccess;
  // Pinned memory has an address on the GPU as well, so it fits either side.
  const auto fits = [](const End& end, bool wants_gpu) {
    return wants_gpu ? !end.is_pageable : !end.is_on_gpu;
  };
  return fits(copy.to, wants_gpu_to) && fits(copy.from, wants_gpu_from) ? cudaSuccess
                                                                        : cudaErrorInvalidValue;
}

/// From pageable memory the bytes are taken at the call, except in a capture, which keeps the
/// address.
Work work_of(void* to, const void* from, std::size_t bytes, bool is_staged) {
  if (!is_staged) return {.now = [=] { std::memmove(to, from, bytes); }};
  const auto* first = static_cast<const std::byte*>(from);
  auto staged = std::make_shared<const std::vector<std::byte>>(first, first + bytes);
  return {.now = [=] { std::memcpy(to, staged->data(), bytes); }};
}

void wait_for(Lock& lock, const OperationPtr& operation) {
  wait(lock, [&] { return operation->is_done(); });
}

cudaError_t copy_async(Lock& lock, void* to, const void* from, std::size_t bytes,
                       cudaMemcpyKind kind, Stream* stream) {
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (bytes == 0) return cudaSuccess;
  const Copy copy{end_of(to, bytes), end_of(from, bytes)};
  if (const cudaError_t error = check(copy, kind); error != cudaSuccess) return error;
  const bool captured = stream->capture != nullptr;
  OperationPtr queued;
  const cudaError_t error =
      submit(*stream, work_of(to, from, bytes, copy.from.is_pageable && !captured), &queued);
  // Into pageable memory the call returns when the bytes have arrived.
  if (error == cudaSuccess && copy.to.is_pageable && !captured) wait_for(lock, queued);
  return error;
}

/// Copies rows between GPUs, with a pitch at either end.
cudaError_t copy_rows_async(void* to, std::size_t to_pitch, const void* from,
                            std::size_t from_pitch, std::size_t width, std::size_t rows,
                            cudaMemcpyKind kind, Stream* stream) {
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (width > to_pitch || width > from_pitch) return cudaErrorInvalidPitchValue;
  if (width == 0 || rows == 0) return cudaSuccess;
  const Copy copy{end_of(to, (rows - 1) * to_pitch + width),
                  end_of(from, (rows - 1) * from_pitch + width)};
  if (const cudaError_t error = check(copy, kind); error != cudaSuccess) return error;
  if (!copy.to.is_on_gpu || !copy.from.is_on_gpu) return cudaErrorNotSupported;
  return submit(*stream, {.now = [=] {
    for (std::size_t row = 0; row < rows; ++row)
      std::memmove(static_cast<std::byte*>(to) + row * to_pitch,
                   static_cast<const std::byte*>(from) + row * from_pitch, width);
  }});
}

/// Copies in the default stream. Between GPUs the host does not wait. From pageable memory it waits
/// for earlier work, and the bytes may still be in flight when the call returns.
cudaError_t copy_now(Lock& lock, void* to, const void* from, std::size_t bytes,
                     cudaMemcpyKind kind) {
  Stream& stream = default_stream(current_device());
  if (const cudaError_t error = refuse_on_captured(stream); error != cudaSuccess) return error;
  if (bytes == 0) return cudaSuccess;
  const Copy copy{end_of(to, bytes), end_of(from, bytes)};
  if (const cudaError_t error = check(copy, kind); error != cudaSuccess) return error;
  const bool is_staged = copy.from.is_pageable && copy.to.is_on_gpu && bytes <= kMostStaged;
  OperationPtr before, queued;
  if (const cudaError_t error = submit(stream, {}, &before); error != cudaSuccess) return error;
  if (const cudaError_t error = submit(stream, work_of(to, from, bytes, is_staged), &queued);
      error != cudaSuccess)
    return error;
  if (copy.to.is_on_gpu && copy.from.is_on_gpu) return cudaSuccess;
  wait_for(lock, is_staged ? before : queued);
  return cudaSuccess;
}

cudaError_t fill_async(void* to, int value, std::size_t bytes, Stream* stream) {
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (bytes == 0) return cudaSuccess;
  const End end = end_of(to, bytes);
  if (!end.is_good || end.is_pageable) return cudaErrorInvalidValue;
  return submit(*stream, {.now = [=] { std::memset(to, value, bytes); }});
}

}  // namespace
}  // namespace longspan::simulated

using namespace longspan::simulated;

extern "C" {

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return call("cudaMemcpy", [&](Lock& lock) { return copy_now(lock, to, from, bytes, kind); });
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return call("cudaMemcpyAsync", [&](Lock& lock) {
    return copy_async(lock, to, from, bytes, kind, find_stream(stream));
  });
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream) {
  return call("cudaMemcpy2DAsync", [&](Lock&) {
    return copy_rows_async(to, to_pitch, from, from_pitch, width, height, kind,
                           find_stream(stream));
  });
}

/// The host waits for a fill of its own memory only.
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  return call("cudaMemset", [&](Lock& lock) {
    Stream& stream = default_stream(current_device());
    if (const cudaError_t error = refuse_on_captured(stream); error != cudaSuccess) return error;
    const cudaError_t error = fill_async(to, value, bytes, &stream);
    if (error == cudaSuccess && bytes > 0 && !end_of(to, bytes).is_on_gpu)
      wait_for(lock, stream.last);
    return error;
  });
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  return call("cudaMemsetAsync",
              [&](Lock&) { return fill_async(to, value, bytes, find_stream(stream)); });
}

}  // extern "C"
