#include "kernels/simulated/runtime/devices.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "kernels/simulated/machine.hpp"
#include "kernels/simulated/runtime/calls.hpp"
#include "kernels/simulated/runtime/settings.hpp"

namespace longspan::simulated {
namespace {

constexpr int kOrdinaryShared = 48 << 10;  // bytes that a block may have without a raised limit
constexpr int kRegisters = 65536;          // of a multiprocessor, and of a block

bool is_device(int device) {
  return device >= 0 && device < static_cast<int>(settings().gpus.size());
}

/// Domain, bus, device; the bus is counted from 1 on.
constexpr const char* kBusFormat = "%08x:%02x:%02x.0";
int bus_of(int device) { return device_on_node(device) + 1; }

void describe(int device, cudaDeviceProp& p) {
  const Properties& own = properties();
  p = {};
  std::snprintf(p.name, sizeof p.name, "Simulated GPU sm_%d%d", own.major, own.minor);
  std::memcpy(p.uuid.bytes, "longspan-gpu-", 13);
  p.uuid.bytes[15] = static_cast<char>(bus_of(device));
  p.totalGlobalMem = settings().memory_bytes;
  p.sharedMemPerBlock = kOrdinaryShared;
  p.sharedMemPerBlockOptin = static_cast<std::size_t>(own.block_shared_bytes);
  p.sharedMemPerMultiprocessor = static_cast<std::size_t>(own.shared_bytes);
  p.reservedSharedMemPerBlock = static_cast<std::size_t>(own.own_shared_bytes);
  p.regsPerBlock = p.regsPerMultiprocessor = kRegisters;
  p.warpSize = 32;
  p.maxThreadsPerBlock = 1024;
  p.maxThreadsPerMultiProcessor = own.most_threads;
  const int block[] = {1024, 1024, 64}, grid[] = {2147483647, 65535, 65535};
  std::copy_n(block, 3, p.maxThreadsDim);
  std::copy_n(grid, 3, p.maxGridSize);
  p.major = own.major;
  p.minor = own.minor;
  p.multiProcessorCount = own.multiprocessors;
  p.l2CacheSize = 32 << 20;
  p.pciBusID = bus_of(device);
  p.concurrentKernels = p.unifiedAddressing = p.canMapHostMemory = 1;
  p.asyncEngineCount = 1;
}

/// False: the attribute is not known here.
bool attribute_of(cudaDeviceAttr name, int device, int& value) {
  const Properties& own = properties();
  switch (name) {
    case cudaDevAttrComputeCapabilityMajor:
      value = own.major;
      return true;
    case cudaDevAttrComputeCapabilityMinor:
      value = own.minor;
      return true;
    case cudaDevAttrMultiProcessorCount:
      value = own.multiprocessors;
      return true;
    case cudaDevAttrMaxThreadsPerBlock:
      value = 1024;
      return true;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      value = own.most_threads;
      return true;
    case cudaDevAttrWarpSize:
      value = 32;
      return true;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      value = kOrdinaryShared;
      return true;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      value = own.block_shared_bytes;
      return true;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      value = own.shared_bytes;
      return true;
    case cudaDevAttrReservedSharedMemoryPerBlock:
      value = own.own_shared_bytes;
      return true;
    case cudaDevAttrL2CacheSize:
      value = 4 << 20;
      return true;
    case cudaDevAttrPciBusId:
      value = bus_of(device);
      return true;
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrCanMapHostMemory:
      value = 1;
      return true;
    default:
      return false;
  }
}

}  // namespace

int device_on_node(int device) {
  return is_device(device) ? settings().gpus[static_cast<std::size_t>(device)] : -1;
}

int visible_device(int on_node) {
  const auto& gpus = settings().gpus;
  const auto found = std::find(gpus.begin(), gpus.end(), on_node);
  return found == gpus.end() ? -1 : static_cast<int>(found - gpus.begin());
}

}  // namespace longspan::simulated

using namespace longspan::simulated;

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  return call("cudaGetDeviceCount", [&](Lock&) {
    if (count == nullptr) return cudaErrorInvalidValue;
    *count = static_cast<int>(settings().gpus.size());
    return *count == 0 ? cudaErrorNoDevice : cudaSuccess;
  });
}

cudaError_t cudaGetDevice(int* device) {
  return call("cudaGetDevice", [&](Lock&) {
    if (device == nullptr) return cudaErrorInvalidValue;
    if (settings().gpus.empty()) return cudaErrorNoDevice;
    *device = current_device();
    return cudaSuccess;
  });
}

cudaError_t cudaSetDevice(int device) {
  return call("cudaSetDevice", [&](Lock&) {
    if (!is_device(device)) return cudaErrorInvalidDevice;
    current_device() = device;
    return cudaSuccess;
  });
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int device) {
  return call("cudaGetDeviceProperties", [&](Lock&) {
    if (found == nullptr) return cudaErrorInvalidValue;
    if (!is_device(device)) return cudaErrorInvalidDevice;
    describe(device, *found);
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr name, int device) {
  return call("cudaDeviceGetAttribute", [&](Lock&) {
    if (!is_device(device)) return cudaErrorInvalidDevice;
    const bool known = value != nullptr && attribute_of(name, device, *value);
    return known ? cudaSuccess : cudaErrorInvalidValue;
  });
}

cudaError_t cudaDeviceGetPCIBusId(char* bus, int length, int device) {
  return call("cudaDeviceGetPCIBusId", [&](Lock&) {
    if (!is_device(device)) return cudaErrorInvalidDevice;
    if (bus == nullptr || length <= 0) return cudaErrorInvalidValue;
    std::snprintf(bus, static_cast<std::size_t>(length), kBusFormat, 0u,
                  static_cast<unsigned>(bus_of(device)), 0u);
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetByPCIBusId(int* device, const char* bus) {
  return call("cudaDeviceGetByPCIBusId", [&](Lock&) {
    unsigned domain = 0, number = 0, slot = 0;
    if (device == nullptr || bus == nullptr ||
        std::sscanf(bus, "%x:%x:%x", &domain, &number, &slot) != 3)
      return cudaErrorInvalidValue;
    *device = domain == 0 && slot == 0 ? visible_device(static_cast<int>(number) - 1) : -1;
    return *device < 0 ? cudaErrorInvalidDevice : cudaSuccess;
  });
}

/// Every GPU reaches every other one, and none itself.
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  return call("cudaDeviceCanAccessPeer", [&](Lock&) {
    if (!is_device(device) || !is_device(peer)) return cudaErrorInvalidDevice;
    if (can == nullptr) return cudaErrorInvalidValue;
    *can = device != peer ? 1 : 0;
    return cudaSuccess;
  });
}

/// It checks nothing: all kernels can reach all memory.
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  return call("cudaDeviceEnablePeerAccess", [&](Lock&) {
    if (flags != 0) return cudaErrorInvalidValue;
    return is_device(peer) && peer != current_device() ? cudaSuccess : cudaErrorInvalidDevice;
  });
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  return call("cudaRuntimeGetVersion", [&](Lock&) {
    *version = CUDART_VERSION;
    return cudaSuccess;
  });
}
cudaError_t cudaDriverGetVersion(int* version) {
  return call("cudaDriverGetVersion", [&](Lock&) {
    *version = CUDART_VERSION;
    return cudaSuccess;
  });
}

}  // extern "C"
