// Streams, events and captures, by their handles. All of it is called with the machine's mutex
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

/// What streams record while they are captured.
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
  bool is_blocking = true;    // waits for the default stream, and that waits for it
  OperationPtr last;          // queued; null: none that is not done
  CapturePtr capture;         // null: it is not captured
  std::vector<int> frontier;  // nodes of the capture that what comes next follows
  bool began_capture = false;
};

struct Event {
  int device = 0;
  bool is_timed = true;
  OperationPtr last;   // its record; null: it was never recorded
  CapturePtr capture;  // it was last recorded in a capture
  std::vector<int> nodes;
};

/// Null: there is no such stream, or event.
Stream* find_stream(cudaStream_t handle);
Event* find_event(cudaEvent_t handle);

/// The default stream of a GPU.
Stream& default_stream(int device);

/// Puts work into a stream: into its capture, where it has one. Gives what the call returns.
/// `queued`: the operation, where it was queued. `after`: what it waits for besides the stream.
cudaError_t submit(Stream& stream, Work work, OperationPtr* queued = nullptr,
                   std::vector<OperationPtr> after = {});

/// Until all that the streams of a GPU were given so far is done.
void wait_for_device(Lock& lock, int device);

/// Whether the default stream of a GPU may not be used, since a stream that it would wait for is
/// being captured; that capture becomes invalid.
bool captures_blocking_stream(int device);
/// The streams that take part in a capture, and their return to ordinary life.
std::vector<const Stream*> streams_of(const CapturePtr& capture);
void end_captures(const CapturePtr& capture);

/// What a call returns that captures do not allow, which become invalid by it. Success: there are
/// none that would mind.
cudaError_t refuse_in_capture();
/// The same for a call that is about one stream and waits, or asks.
cudaError_t refuse_on_captured(Stream& stream);

/// Of this thread, for calls that captures do not allow.
cudaStreamCaptureMode& capture_mode();

}  // namespace longspan::simulated
