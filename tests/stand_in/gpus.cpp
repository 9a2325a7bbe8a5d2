#include "tests/stand_in/gpus.hpp"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "comm/cuda/stream_flags.hpp"
#include "cuda_runtime_api.h"
#include "longspan/error.hpp"
#include "longspan/info.hpp"

namespace longspan::stand_in {
namespace {

constexpr int kDevices = 8;

std::mutex mutex;
std::map<void*, bool> pieces;                   // of memory: whether it is the host's
std::map<std::pair<int, void*>, int> mappings;  // by device
std::set<cudaStream_t> streams;
int events = 0, bad = 0;
std::atomic<bool> misleads = false, streams_are_busy = false;

thread_local int device = 0, calls_until_failure = 0;
thread_local std::string failed;
thread_local cudaError_t last = cudaSuccess;

/// Every call begins with this, and returns its result where it is not a success.
cudaError_t enter(const char* call) {
  if (calls_until_failure == 0 || --calls_until_failure > 0) return cudaSuccess;
  failed = call;
  return last = cudaErrorMemoryAllocation;
}

cudaError_t refuse(cudaError_t error) { return last = error; }

cudaError_t allocate(void** memory, std::size_t bytes, bool host) {
  void* piece = std::malloc(bytes);
  std::memset(piece, 0x5a, bytes);
  const std::lock_guard lock(mutex);
  pieces[piece] = host;
  *memory = piece;
  return cudaSuccess;
}

cudaError_t release(void* memory, bool host) {
  if (memory == nullptr) return cudaSuccess;
  const std::lock_guard lock(mutex);
  const auto piece = pieces.find(memory);
  if (piece == pieces.end() || piece->second != host) {
    ++bad;
    return refuse(cudaErrorInvalidValue);
  }
  for (const auto& [mapping, count] : mappings)
    if (mapping.second == memory && count > 0) ++bad;
  pieces.erase(piece);
  std::free(memory);
  return cudaSuccess;
}

}  // namespace

Alive alive() {
  const std::lock_guard lock(mutex);
  Alive now{.events = events, .streams = static_cast<int>(streams.size())};
  for (const auto& [piece, host] : pieces) ++(host ? now.host : now.memory);
  for (const auto& [mapping, count] : mappings) now.mappings += count;
  return now;
}

int offences() {
  const std::lock_guard lock(mutex);
  return bad;
}

void clear() {
  const std::lock_guard lock(mutex);
  for (const auto& [piece, host] : pieces) std::free(piece);
  for (const cudaStream_t stream : streams) delete reinterpret_cast<char*>(stream);
  pieces.clear();
  mappings.clear();
  streams.clear();
  bad = 0;
}

void fail_call(int number) {
  calls_until_failure = number;
  failed.clear();
}
std::string failed_call() { return failed; }
void mislead(bool wrongly) { misleads = wrongly; }
void keep_streams_busy(bool busy) { streams_are_busy = busy; }

}  // namespace longspan::stand_in

// From src/communicator/info.cpp, which is not linked.
int longspan::gpu_count() { return stand_in::kDevices; }

using namespace longspan::stand_in;

#define ENTER() \
  if (const cudaError_t entered = enter(__func__); entered != cudaSuccess) return entered

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory" : "an error";
}
cudaError_t cudaGetLastError() { return std::exchange(last, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last; }

cudaError_t cudaGetDevice(int* current) {
  ENTER();
  *current = device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int wanted) {
  ENTER();
  if (wanted < 0 || wanted >= kDevices) return refuse(cudaErrorInvalidDevice);
  device = wanted;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  ENTER();
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  ENTER();
  std::snprintf(properties->name, sizeof properties->name, "stand-in");
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* bus, int length, int of) {
  ENTER();
  std::snprintf(bus, static_cast<std::size_t>(length), "0000:%02d:00.0", of);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetByPCIBusId(int* found, const char* bus) {
  ENTER();
  *found = std::atoi(bus + 5);
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  ENTER();
  *can = 1;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  ENTER();
  return allocate(memory, bytes, false);
}
cudaError_t cudaFree(void* memory) {
  ENTER();
  return release(memory, false);
}
cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned) {
  ENTER();
  return allocate(memory, bytes, true);
}
cudaError_t cudaFreeHost(void* memory) {
  ENTER();
  return release(memory, true);
}
cudaError_t cudaHostGetDevicePointer(void** seen, void* memory, unsigned) {
  ENTER();
  *seen = memory;
  return cudaSuccess;
}
cudaError_t cudaMemset(void* memory, int value, std::size_t bytes) {
  ENTER();
  std::memset(memory, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  ENTER();
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind,
                            cudaStream_t) {
  ENTER();
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from,
                              std::size_t from_pitch, std::size_t width, std::size_t height,
                              cudaMemcpyKind, cudaStream_t) {
  ENTER();
  for (std::size_t row = 0; row < height; ++row)
    std::memcpy(static_cast<std::byte*>(to) + row * to_pitch,
                static_cast<const std::byte*>(from) + row * from_pitch, width);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  ENTER();
  *free = *total = 0;
  return cudaSuccess;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* memory) {
  ENTER();
  *handle = {};
  std::memcpy(handle->reserved, &memory, sizeof memory);
  return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t handle, unsigned) {
  ENTER();
  std::memcpy(memory, handle.reserved, sizeof *memory);
  const std::lock_guard lock(mutex);
  if (!pieces.contains(*memory)) return refuse(cudaErrorInvalidResourceHandle);
  if (misleads) {
    static char other[1 << 16];
    *memory = other;
  }
  ++mappings[{device, *memory}];
  return cudaSuccess;
}
cudaError_t cudaIpcCloseMemHandle(void* memory) {
  ENTER();
  const std::lock_guard lock(mutex);
  const auto mapping = mappings.find({device, memory});
  if (mapping == mappings.end()) {
    ++bad;
    return refuse(cudaErrorInvalidValue);
  }
  if (--mapping->second == 0) mappings.erase(mapping);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  ENTER();
  *stream = reinterpret_cast<cudaStream_t>(new char);
  const std::lock_guard lock(mutex);
  streams.insert(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return cudaStreamCreateWithFlags(stream, flags);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  ENTER();
  const std::lock_guard lock(mutex);
  if (streams.erase(stream) == 0) return refuse(cudaErrorInvalidResourceHandle);
  delete reinterpret_cast<char*>(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t event, unsigned) {
  ENTER();
  return event == nullptr ? refuse(cudaErrorInvalidResourceHandle) : cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t) {
  ENTER();
  return streams_are_busy ? refuse(cudaErrorNotReady) : cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) {
  ENTER();
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  ENTER();
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  ENTER();
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  ENTER();
  static char any;
  *event = reinterpret_cast<cudaEvent_t>(&any);
  const std::lock_guard lock(mutex);
  ++events;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  ENTER();
  if (event == nullptr) return refuse(cudaErrorInvalidResourceHandle);
  const std::lock_guard lock(mutex);
  --events;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) {
  ENTER();
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t) {
  ENTER();
  return cudaSuccess;
}

/// A stream is the thread that gives it work, and waits for a flag in that call.
void longspan::comm::queue_flags(cudaStream_t, std::span<const FlagOperation> operations) {
  if (enter(__func__) != cudaSuccess) throw BackendError("out of memory");
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  for (const FlagOperation& operation : operations) {
    std::atomic_ref raised(*reinterpret_cast<std::uint32_t*>(operation.flag));
    std::atomic_ref freed(*reinterpret_cast<std::uint32_t*>(operation.flag + 4));
    switch (operation.kind) {
      case FlagOperation::raise:
        raised = 1;
        break;
      case FlagOperation::lower:
        raised = 0;
        break;
      case FlagOperation::free:
        freed = 0x7fffffff;
        break;
      case FlagOperation::wait:
        while (raised == 0 && freed == 0) {
          if (std::chrono::steady_clock::now() > end) throw BackendError("nobody raised the flag");
          std::this_thread::yield();
        }
    }
  }
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* kernel, void** places) {
  ENTER();
  reinterpret_cast<void (*)(int*)>(const_cast<void*>(kernel))(*static_cast<int**>(places[0]));
  return cudaSuccess;
}
