#include "kernels/simulated/runtime/streams.hpp"

#include <algorithm>
#include <map>
#include <utility>

#include "kernels/simulated/runtime/captures.hpp"
#include "kernels/simulated/runtime/waiting.hpp"

namespace longspan::simulated {
namespace {

struct Streams {
  std::map<cudaStream_t, std::unique_ptr<Stream>> made;
  std::map<int, Stream> defaults;  // by GPU
  // of destroyed streams, with their remaining work
  std::vector<std::pair<int, OperationPtr>> left;
};

Streams& streams() {
  static Streams* const all = new Streams;
  return *all;
}

/// Calls use(stream) for each that waits for the default stream of its GPU.
template <class Use>
void for_each_blocking(int device, const Use& use) {
  for (auto& [handle, stream] : streams().made)
    if (stream->device == device && stream->is_blocking) use(*stream);
}

bool is_done(const OperationPtr& operation) { return operation == nullptr || operation->is_done(); }
bool are_done(const std::vector<OperationPtr>& all) {
  return std::all_of(all.begin(), all.end(), is_done);
}

void add_left(int device, std::vector<OperationPtr>& to) {
  std::erase_if(streams().left, [](const auto& one) { return one.second->is_done(); });
  for (const auto& [of, last] : streams().left)
    if (of == device) to.push_back(last);
}

/// The operations after which a stream's work has ended.
std::vector<OperationPtr> last_of(const Stream& stream) {
  std::vector<OperationPtr> last{stream.last};
  if (!stream.is_default) return last;
  for_each_blocking(stream.device, [&](Stream& other) { last.push_back(other.last); });
  add_left(stream.device, last);
  return last;
}

cudaError_t create(cudaStream_t* handle, unsigned flags) {
  if (handle == nullptr || (flags & ~unsigned{cudaStreamNonBlocking}) != 0)
    return cudaErrorInvalidValue;
  auto stream = std::make_unique<Stream>();
  stream->device = current_device();
  stream->is_blocking = flags == cudaStreamDefault;
  *handle = reinterpret_cast<cudaStream_t>(stream.get());
  streams().made.emplace(*handle, std::move(stream));
  return cudaSuccess;
}

}  // namespace

Stream& default_stream(int device) {
  Stream& stream = streams().defaults[device];
  stream.device = device;
  stream.is_default = true;
  return stream;
}

Stream* find_stream(cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy) return &default_stream(current_device());
  const auto found = streams().made.find(handle);
  return found == streams().made.end() ? nullptr : found->second.get();
}

cudaError_t submit(Stream& stream, Work work, OperationPtr* queued,
                   std::vector<OperationPtr> after) {
  if (stream.capture != nullptr) return add_node(stream, std::move(work));
  // A kernel may overlap the one directly before it, but not other operations that it waits for.
  OperationPtr overlapped;
  if (work.is_kernel() && work.overlaps && !is_done(stream.last) && stream.last->work().is_kernel())
    overlapped = stream.last;
  else
    after.push_back(stream.last);
  if (stream.is_default) {
    if (captures_blocking_stream(stream.device)) return cudaErrorStreamCaptureImplicit;
    for_each_blocking(stream.device, [&](Stream& other) { after.push_back(other.last); });
    add_left(stream.device, after);
  } else if (stream.is_blocking) {
    after.push_back(default_stream(stream.device).last);
  }
  work.device = stream.device;
  order_host_before_kernels();
  stream.last = operations().queue(std::make_shared<const Work>(std::move(work)), std::move(after),
                                   std::move(overlapped));
  if (queued != nullptr) *queued = stream.last;
  return cudaSuccess;
}

void wait_for_device(Lock& lock, int device) {
  std::vector<OperationPtr> last{default_stream(device).last};
  for (auto& [handle, stream] : streams().made)
    if (stream->device == device) last.push_back(stream->last);
  add_left(device, last);
  wait(lock, [&] { return are_done(last); });
}

bool captures_blocking_stream(int device) {
  bool any = false;
  for_each_blocking(device, [&](Stream& stream) {
    if (stream.capture == nullptr) return;
    stream.capture->is_invalid = any = true;
  });
  return any;
}

void end_captures(const CapturePtr& capture) {
  for (auto& [handle, stream] : streams().made)
    if (stream->capture == capture) {
      stream->capture = nullptr;
      stream->frontier.clear();
      stream->began_capture = false;
    }
}

std::vector<const Stream*> streams_of(const CapturePtr& capture) {
  std::vector<const Stream*> all;
  for (const auto& [handle, stream] : streams().made)
    if (stream->capture == capture) all.push_back(stream.get());
  return all;
}

}  // namespace longspan::simulated

using namespace longspan::simulated;

extern "C" {

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return call("cudaStreamCreate", [&](Lock&) { return create(stream, cudaStreamDefault); });
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return call("cudaStreamCreateWithFlags", [&](Lock&) { return create(stream, flags); });
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return call("cudaStreamCreateWithPriority", [&](Lock&) { return create(stream, flags); });
}

/// Its remaining work still happens.
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  return call("cudaStreamDestroy", [&](Lock&) {
    Stream* const stream = find_stream(handle);
    if (stream == nullptr || stream->is_default) return cudaErrorInvalidResourceHandle;
    if (stream->capture != nullptr) stream->capture->is_invalid = true;
    if (!is_done(stream->last)) streams().left.emplace_back(stream->device, stream->last);
    streams().made.erase(handle);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  return call("cudaStreamSynchronize", [&](Lock& lock) {
    Stream* stream = find_stream(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (const cudaError_t error = refuse_on_captured(*stream); error != cudaSuccess) return error;
    // Work queued while this thread waits is not waited for, and the stream itself may be
    // destroyed.
    const std::vector<OperationPtr> last = last_of(*stream);
    wait(lock, [&] { return are_done(last); });
    return cudaSuccess;
  });
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  return call("cudaStreamQuery", [&](Lock&) {
    Stream* const stream = find_stream(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (const cudaError_t error = refuse_on_captured(*stream); error != cudaSuccess) return error;
    const std::vector<OperationPtr> last = last_of(*stream);
    go_on_a_little([&] { return are_done(last); });
    return are_done(last) ? cudaSuccess : cudaErrorNotReady;
  });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned) {
  return call("cudaStreamWaitEvent", [&](Lock&) {
    Stream* const stream = find_stream(handle);
    Event* const event = find_event(event_handle);
    if (stream == nullptr || event == nullptr) return cudaErrorInvalidResourceHandle;
    if (event->capture != nullptr || stream->capture != nullptr)
      return join_capture(*stream, *event);
    if (event->last == nullptr) return cudaSuccess;
    return submit(*stream, {}, nullptr, {event->last});
  });
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  return call("cudaLaunchHostFunc", [&](Lock&) {
    Stream* const stream = find_stream(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (function == nullptr) return cudaErrorInvalidValue;
    return submit(*stream, {.now = [=] { function(data); }});
  });
}

cudaError_t cudaDeviceSynchronize() {
  return call("cudaDeviceSynchronize", [&](Lock& lock) {
    if (const cudaError_t error = refuse_in_capture(); error != cudaSuccess) return error;
    wait_for_device(lock, current_device());
    return cudaSuccess;
  });
}

}  // extern "C"
