#include "kernels/simulated/runtime/launches.hpp"

#include <cuda.h>
#include <cxxabi.h>
#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "kernels/simulated/runtime/settings.hpp"
#include "kernels/simulated/runtime/stream_memory.hpp"
#include "kernels/simulated/runtime/streams.hpp"
#include "kernels/simulated/runtime/waiting.hpp"

extern "C" CUresult simulated_encode_tiled(
    CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
    const cuuint64_t* extents, const cuuint64_t* strides, const cuuint32_t* box,
    const cuuint32_t* steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
    CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill);

namespace longspan::simulated {
namespace {

constexpr int kOrdinaryShared = 48 << 10;
constexpr unsigned kMostThreads = 1024;

/// The dynamic shared memory that a kernel is allowed. The caller holds the mutex.
int& allowed_shared(const void* kernel) {
  static auto* const all = new std::map<const void*, int>;
  return all->try_emplace(kernel, kOrdinaryShared).first->second;
}

bool fits(dim3 grid, dim3 block) {
  const auto within = [](unsigned value, unsigned most) { return value >= 1 && value <= most; };
  return within(grid.x, 0x7fffffff) && within(grid.y, 65535) && within(grid.z, 65535) &&
         within(block.x, kMostThreads) && within(block.y, kMostThreads) && within(block.z, 64) &&
         static_cast<std::size_t>(block.x) * block.y * block.z <= kMostThreads;
}

/// The thread that loads code at present.
std::thread::id loader;

/// CUDA may load the code of a kernel when it is first launched, and then waits for the GPU's work.
/// LONGSPAN_SIMULATED_LAZY_LOADING=1 has every first launch wait so.
void load(Lock& lock, const void* kernel) {
  static auto* const loaded = new std::set<std::pair<int, const void*>>;
  const int device = current_device();
  if (!settings().loads_lazily || !loaded->insert({device, kernel}).second) return;
  loader = std::this_thread::get_id();
  wait_for_device(lock, device);
  loader = {};
}

int architecture() { return properties().major * 10 + properties().minor; }

}  // namespace

void wait_for_loads(Lock& lock, const char* name) {
  const std::string_view call(name);
  if (call.ends_with("Query") || call.starts_with("cudaGet") || call == "cudaSetDevice") return;
  if (loader == std::thread::id() || loader == std::this_thread::get_id()) return;
  wait_for_others(lock, [] { return loader == std::thread::id(); });  // for the loading thread
}

const char* name_of_kernel(const void* address, const char* file, unsigned line) {
  std::string name;
  Dl_info found{};
  if (dladdr(address, &found) != 0 && found.dli_saddr == address && found.dli_sname != nullptr) {
    int status = 0;
    char* const readable = abi::__cxa_demangle(found.dli_sname, nullptr, nullptr, &status);
    name = std::string(readable != nullptr ? readable : found.dli_sname) + ", launched at ";
    std::free(readable);
  } else {
    name = "the kernel launched at ";
  }
  const std::string_view path(file);
  name += path.substr(path.rfind('/') + 1);
  name += ":" + std::to_string(line);
  static std::mutex mutex;
  static auto* const names = new std::set<std::string>;
  const std::lock_guard lock(mutex);
  return names->insert(std::move(name)).first->c_str();
}

cudaError_t queue_kernel(Kernel kernel, const void* address, cudaStream_t handle, bool overlaps) {
  return call("cudaLaunchKernelExC", [&](Lock& lock) {
    Stream* const stream = find_stream(handle);
    if (stream == nullptr || stream->device != current_device())
      return cudaErrorInvalidResourceHandle;
    if (!fits(kernel.grid, kernel.block)) return cudaErrorInvalidConfiguration;
    if (kernel.shared_bytes > static_cast<std::size_t>(allowed_shared(address)))
      return cudaErrorInvalidValue;
    if (stream->capture == nullptr) load(lock, address);
    return submit(*stream, {.kernel = std::move(kernel), .overlaps = overlaps});
  });
}

}  // namespace longspan::simulated

using namespace longspan::simulated;

extern "C" {

/// Code compiled for CPUs has no registers or sizes to report.
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  return call("cudaFuncGetAttributes", [&](Lock& lock) {
    if (attributes == nullptr) return cudaErrorInvalidValue;
    if (kernel == nullptr) return cudaErrorInvalidDeviceFunction;
    load(lock, kernel);
    *attributes = {};
    attributes->ptxVersion = attributes->binaryVersion = architecture();
    attributes->maxThreadsPerBlock = kMostThreads;
    attributes->maxDynamicSharedSizeBytes = allowed_shared(kernel);
    return cudaSuccess;
  });
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute name, int value) {
  return call("cudaFuncSetAttribute", [&](Lock&) {
    if (kernel == nullptr) return cudaErrorInvalidDeviceFunction;
    if (name == cudaFuncAttributePreferredSharedMemoryCarveout) return cudaSuccess;
    if (name != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 ||
        value > properties().block_shared_bytes)
      return cudaErrorInvalidValue;
    allowed_shared(kernel) = value;
    return cudaSuccess;
  });
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* kernel,
                                                          int threads, size_t shared_bytes) {
  return call("cudaOccupancyMaxActiveBlocksPerMultiprocessor", [&](Lock&) {
    if (blocks == nullptr || threads <= 0) return cudaErrorInvalidValue;
    if (kernel == nullptr) return cudaErrorInvalidDeviceFunction;
    *blocks = threads > static_cast<int>(kMostThreads) ? 0 : resident_blocks(threads, shared_bytes);
    return cudaSuccess;
  });
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  return call("cudaGetDriverEntryPointByVersion", [&](Lock&) {
    if (symbol == nullptr || function == nullptr) return cudaErrorInvalidValue;
    const std::string_view name(symbol);
    *function = name == "cuTensorMapEncodeTiled" ? reinterpret_cast<void*>(&simulated_encode_tiled)
                : name == "cuStreamBatchMemOp"   ? reinterpret_cast<void*>(&simulated_stream_batch)
                                                 : nullptr;
    if (result != nullptr)
      *result =
          *function != nullptr ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
  });
}

}  // extern "C"
