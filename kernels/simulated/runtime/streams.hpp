// Streams, events and captures, by their handles. All functions are called with the machine's mutex
// held.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <thread>
#include <vector>

#include "kernels/simulated/runtime/calls.hpp"
#include "kernels/simulated/runtime/operations.hpp"

namespace longspan::simulated {

/// Work in a graph and the nodes before it, which have lower numbers.
struct Node {
  WorkPtr work;
  std::vector<int> after;
  int overlapped = -1;  // one of `after`: a kernel that this one may overlap
};

/// The record of streams that are captured.
struct Capture {
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  std::vector<Node> nodes;
  bool is_invalid = false;
};
using CapturePtr = std::shared_ptr<Capture>;

struct Stream {
  int device = 0;
  bool is_default = false;    // the legacy one, which has no handle of its own
  bool is_blocking = true;    // waits for the default stream, and the default stream for it
  OperationPtr last;          // queued; null: all are done
  CapturePtr capture;         // null: not captured
  std::vector<int> frontier;  // nodes of the capture that the next operation follows
  bool began_capture = false;
};

struct Event {
  int device = 0;
  bool is_timed = true;
  OperationPtr last;   // its record; null: never recorded
  CapturePtr capture;  // set if it was last recorded in a capture
  std::vector<int> nodes;
};

/// Null: the stream, or the event, does not exist.
Stream* find_stream(cudaStream_t handle);
Event* find_event(cudaEvent_t handle);

/// The default stream of a GPU.
Stream& default_stream(int device);

/// Puts work into a stream: into its capture, if it has one. Returns the result of the call.
/// `queued`: the operation, if it was queued. `after`: operations that it waits for in addition to
/// the stream.
cudaError_t submit(Stream& stream, Work work, OperationPtr* queued = nullptr,
                   std::vector<OperationPtr> after = {});

/// Waits until all earlier work of a GPU's streams is done.
void wait_for_device(Lock& lock, int device);

/// Whether the default stream of a GPU may not be used, because a stream that it would wait for is
/// being captured; that capture becomes invalid.
bool captures_blocking_stream(int device);
/// The streams that take part in a capture, and the end of their part in it.
std::vector<const Stream*> streams_of(const CapturePtr& capture);
void end_captures(const CapturePtr& capture);

/// The result of a call that captures forbid, which makes them invalid. Success: no capture forbids
/// it.
cudaError_t refuse_in_capture();
/// The same for a call on one stream that waits, or queries.
cudaError_t refuse_on_captured(Stream& stream);

/// Of this thread, for calls that captures forbid.
cudaStreamCaptureMode& capture_mode();

}  // namespace longspan::simulated
