// Marks in streams, and the times between them on the machine's clock.
#include <map>
#include <memory>

#include "kernels/simulated/runtime/streams.hpp"
#include "kernels/simulated/runtime/waiting.hpp"

namespace longspan::simulated {
namespace {

using Events = std::map<cudaEvent_t, std::unique_ptr<Event>>;

Events& events() {
  static Events* const all = new Events;
  return *all;
}

cudaError_t create(cudaEvent_t* handle, unsigned flags) {
  constexpr unsigned kKnown = cudaEventBlockingSync | cudaEventDisableTiming;
  if (handle == nullptr || (flags & ~kKnown) != 0) return cudaErrorInvalidValue;
  auto event = std::make_unique<Event>();
  event->device = current_device();
  event->is_timed = (flags & cudaEventDisableTiming) == 0;
  *handle = reinterpret_cast<cudaEvent_t>(event.get());
  events().emplace(*handle, std::move(event));
  return cudaSuccess;
}

cudaError_t record(Event& event, Stream& stream) {
  if (stream.capture != nullptr) {
    if (stream.capture->is_invalid) return cudaErrorStreamCaptureInvalidated;
    event.capture = stream.capture;
    event.nodes = stream.frontier;
    return cudaSuccess;
  }
  if (event.device != stream.device) return cudaErrorInvalidResourceHandle;
  OperationPtr mark;
  if (const cudaError_t error = submit(stream, {}, &mark); error != cudaSuccess) return error;
  event.capture = nullptr;
  event.last = mark;
  return cudaSuccess;
}

/// Refuses queries of events for which they are not allowed.
cudaError_t refuse(const Event& event) {
  if (event.capture == nullptr) return refuse_in_capture();
  event.capture->is_invalid = true;
  return cudaErrorCapturedEvent;
}

}  // namespace

Event* find_event(cudaEvent_t handle) {
  const auto found = events().find(handle);
  return found == events().end() ? nullptr : found->second.get();
}

}  // namespace longspan::simulated

using namespace longspan::simulated;

extern "C" {

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return call("cudaEventCreate", [&](Lock&) { return create(event, cudaEventDefault); });
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return call("cudaEventCreateWithFlags", [&](Lock&) { return create(event, flags); });
}
cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  return call("cudaEventDestroy", [&](Lock&) {
    return events().erase(handle) > 0 ? cudaSuccess : cudaErrorInvalidResourceHandle;
  });
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle) {
  return call("cudaEventRecord", [&](Lock&) {
    Event* const event = find_event(handle);
    Stream* const stream = find_stream(stream_handle);
    if (event == nullptr || stream == nullptr) return cudaErrorInvalidResourceHandle;
    return record(*event, *stream);
  });
}

/// An event that was never recorded has nothing to wait for.
cudaError_t cudaEventQuery(cudaEvent_t handle) {
  return call("cudaEventQuery", [&](Lock&) {
    const Event* const event = find_event(handle);
    if (event == nullptr) return cudaErrorInvalidResourceHandle;
    if (const cudaError_t error = refuse(*event); error != cudaSuccess) return error;
    if (event->last == nullptr) return cudaSuccess;
    go_on_a_little([&] { return event->last->is_done(); });
    return event->last->is_done() ? cudaSuccess : cudaErrorNotReady;
  });
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  return call("cudaEventSynchronize", [&](Lock& lock) {
    const Event* const event = find_event(handle);
    if (event == nullptr) return cudaErrorInvalidResourceHandle;
    if (const cudaError_t error = refuse(*event); error != cudaSuccess) return error;
    if (const OperationPtr last = event->last; last != nullptr)
      wait(lock, [&] { return last->is_done(); });
    return cudaSuccess;
  });
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  return call("cudaEventElapsedTime", [&](Lock&) {
    const Event *const begin = find_event(from), *const end = find_event(to);
    if (begin == nullptr || end == nullptr) return cudaErrorInvalidResourceHandle;
    if (milliseconds == nullptr) return cudaErrorInvalidValue;
    for (const Event* event : {begin, end})
      if (!event->is_timed || event->last == nullptr) return cudaErrorInvalidResourceHandle;
    for (const Event* event : {begin, end})
      if (!event->last->is_done()) return cudaErrorNotReady;
    const double ns =
        static_cast<double>(end->last->ended_at()) - static_cast<double>(begin->last->ended_at());
    *milliseconds = static_cast<float>(ns * 1e-6);
    return cudaSuccess;
  });
}

}  // extern "C"
