// cudaMalloc and the like.
#include "kernels/simulated/runtime/calls.hpp"
#include "kernels/simulated/runtime/devices.hpp"
#include "kernels/simulated/runtime/ipc.hpp"
#include "kernels/simulated/runtime/memory.hpp"
#include "kernels/simulated/runtime/settings.hpp"
#include "kernels/simulated/runtime/streams.hpp"
#include "kernels/simulated/runtime/waiting.hpp"

namespace longspan::simulated {
namespace {

cudaError_t allocate_into(void** data, std::size_t bytes, Allocation::Kind kind) {
  if (data == nullptr) return cudaErrorInvalidValue;
  if (const cudaError_t error = refuse_in_capture(); error != cudaSuccess) return error;
  *data = nullptr;
  if (bytes == 0) return cudaSuccess;
  const Allocation* const made = allocate(bytes, kind);
  if (made == nullptr) return cudaErrorMemoryAllocation;
  *data = made->data;
  return cudaSuccess;
}

/// Waits for the GPU first, since queued work may still use the memory.
cudaError_t release_waiting(Lock& lock, void* data, Allocation::Kind kind) {
  if (data == nullptr) return cudaSuccess;
  if (const cudaError_t error = refuse_in_capture(); error != cudaSuccess) return error;
  Allocation* allocation = find_allocation(data);
  if (allocation == nullptr || allocation->kind != kind) return cudaErrorInvalidValue;
  const int device = visible_device(allocation->device);
  if (device >= 0) wait_for_device(lock, device);
  allocation = find_allocation(data);  // another thread may have freed it meanwhile
  if (allocation == nullptr || allocation->kind != kind) return cudaErrorInvalidValue;
  check_unused(*allocation);
  release(allocation);
  return cudaSuccess;
}

}  // namespace
}  // namespace longspan::simulated

using namespace longspan::simulated;

extern "C" {

cudaError_t cudaMalloc(void** data, size_t bytes) {
  return call("cudaMalloc",
              [&](Lock&) { return allocate_into(data, bytes, Allocation::Kind::device); });
}
cudaError_t cudaFree(void* data) {
  return call("cudaFree",
              [&](Lock& lock) { return release_waiting(lock, data, Allocation::Kind::device); });
}

cudaError_t cudaHostAlloc(void** data, size_t bytes, unsigned flags) {
  return call("cudaHostAlloc", [&](Lock&) {
    constexpr unsigned kKnown =
        cudaHostAllocPortable | cudaHostAllocMapped | cudaHostAllocWriteCombined;
    if ((flags & ~kKnown) != 0) return cudaErrorInvalidValue;
    return allocate_into(data, bytes, Allocation::Kind::host);
  });
}
cudaError_t cudaMallocHost(void** data, size_t bytes) {
  return call("cudaMallocHost",
              [&](Lock&) { return allocate_into(data, bytes, Allocation::Kind::host); });
}
cudaError_t cudaFreeHost(void* data) {
  return call("cudaFreeHost",
              [&](Lock& lock) { return release_waiting(lock, data, Allocation::Kind::host); });
}

/// One address serves both, as with unified addressing.
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned flags) {
  return call("cudaHostGetDevicePointer", [&](Lock&) {
    const Found found = look_up(host, 1);
    if (device == nullptr || flags != 0 || found.where != Where::inside ||
        found.allocation->kind != Allocation::Kind::host)
      return cudaErrorInvalidValue;
    *device = host;
    return cudaSuccess;
  });
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* data) {
  return call("cudaPointerGetAttributes", [&](Lock&) {
    if (attributes == nullptr) return cudaErrorInvalidValue;
    *attributes = {};
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = cudaInvalidDeviceId;
    const Found found = look_up(data, 1);
    if (found.where != Where::inside) return cudaSuccess;
    const bool of_host = found.allocation->kind == Allocation::Kind::host;
    attributes->type = of_host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    attributes->device = visible_device(found.allocation->device);
    attributes->devicePointer = const_cast<void*>(data);
    if (of_host) attributes->hostPointer = const_cast<void*>(data);
    return cudaSuccess;
  });
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  return call("cudaMemGetInfo", [&](Lock&) {
    if (free == nullptr || total == nullptr) return cudaErrorInvalidValue;
    *free = free_memory(device_on_node(current_device()));
    *total = settings().memory_bytes;
    return cudaSuccess;
  });
}

}  // extern "C"
