#include "kernels/simulated/runtime/captures.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "kernels/simulated/runtime/graphs.hpp"

namespace longspan::simulated {
namespace {

using CaptureList = std::vector<std::weak_ptr<Capture>>;

CaptureList& captures() {
  static CaptureList* const all = new CaptureList;
  return *all;
}

cudaError_t invalidate(Capture& capture, cudaError_t error) {
  capture.is_invalid = true;
  return error;
}

void unite(std::vector<int>& nodes, const std::vector<int>& more) {
  nodes.insert(nodes.end(), more.begin(), more.end());
  std::sort(nodes.begin(), nodes.end());
  nodes.erase(std::unique(nodes.begin(), nodes.end()), nodes.end());
}

/// Whether everything captured comes before the end of the stream that began the capture.
bool is_joined(const CapturePtr& capture, const Stream& origin) {
  std::vector<bool> comes_before(capture->nodes.size());
  for (const int node : origin.frontier) comes_before[static_cast<std::size_t>(node)] = true;
  for (std::size_t node = capture->nodes.size(); node-- > 0;)
    if (comes_before[node])
      for (const int before : capture->nodes[node].after)
        comes_before[static_cast<std::size_t>(before)] = true;
  const auto streams = streams_of(capture);
  return std::all_of(streams.begin(), streams.end(), [&](const Stream* stream) {
    return std::all_of(stream->frontier.begin(), stream->frontier.end(),
                       [&](int node) { return comes_before[static_cast<std::size_t>(node)]; });
  });
}

cudaError_t begin_capture(Stream& stream, cudaStreamCaptureMode mode) {
  if (stream.is_default) return cudaErrorStreamCaptureUnsupported;
  if (stream.capture != nullptr) return cudaErrorIllegalState;
  stream.capture = std::make_shared<Capture>(Capture{mode, std::this_thread::get_id(), {}});
  stream.began_capture = true;
  std::erase_if(captures(), [](const auto& one) { return one.expired(); });
  captures().push_back(stream.capture);
  return cudaSuccess;
}

cudaError_t end_capture(Stream& stream, cudaGraph_t* graph) {
  *graph = nullptr;
  const CapturePtr capture = stream.capture;
  if (capture == nullptr) return cudaErrorIllegalState;
  if (!stream.began_capture) return invalidate(*capture, cudaErrorStreamCaptureUnmatched);
  if (capture->mode != cudaStreamCaptureModeRelaxed &&
      capture->thread != std::this_thread::get_id())
    return invalidate(*capture, cudaErrorStreamCaptureWrongThread);
  const bool joined = is_joined(capture, stream);
  end_captures(capture);
  if (capture->is_invalid) return cudaErrorStreamCaptureInvalidated;
  if (!joined) return invalidate(*capture, cudaErrorStreamCaptureUnjoined);
  *graph = make_graph(capture->nodes);
  return cudaSuccess;
}

}  // namespace

cudaStreamCaptureMode& capture_mode() {
  thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  return mode;
}

cudaError_t add_node(Stream& stream, Work work) {
  Capture& capture = *stream.capture;
  if (capture.is_invalid) return cudaErrorStreamCaptureInvalidated;
  work.device = stream.device;
  Node node{std::make_shared<const Work>(std::move(work)), stream.frontier};
  if (node.work->is_kernel() && node.work->overlaps && node.after.size() == 1 &&
      capture.nodes[static_cast<std::size_t>(node.after[0])].work->is_kernel())
    node.overlapped = node.after[0];
  capture.nodes.push_back(std::move(node));
  stream.frontier = {static_cast<int>(capture.nodes.size()) - 1};
  return cudaSuccess;
}

cudaError_t add_nodes(Stream& stream, const std::vector<Node>& nodes) {
  Capture& capture = *stream.capture;
  if (capture.is_invalid) return cudaErrorStreamCaptureInvalidated;
  if (nodes.empty()) return cudaSuccess;
  const int first = static_cast<int>(capture.nodes.size());
  std::vector<int> last(nodes.size());
  std::iota(last.begin(), last.end(), first);
  for (Node node : nodes) {
    for (int& before : node.after) {
      before += first;
      std::erase(last, before);
    }
    if (node.overlapped >= 0) node.overlapped += first;
    if (node.after.empty()) node.after = stream.frontier;
    capture.nodes.push_back(std::move(node));
  }
  stream.frontier = std::move(last);
  return cudaSuccess;
}

cudaError_t join_capture(Stream& stream, const Event& event) {
  if (event.capture == nullptr) {
    if (event.last == nullptr) return cudaSuccess;
    return invalidate(*stream.capture, cudaErrorStreamCaptureIsolation);
  }
  if (event.capture->is_invalid) return cudaErrorStreamCaptureInvalidated;
  if (streams_of(event.capture).empty()) return cudaErrorCapturedEvent;  // it has ended
  if (stream.is_default) return invalidate(*event.capture, cudaErrorStreamCaptureImplicit);
  if (stream.capture == nullptr) {
    stream.capture = event.capture;
    stream.frontier.clear();
  } else if (stream.capture != event.capture) {
    stream.capture->is_invalid = true;
    return invalidate(*event.capture, cudaErrorStreamCaptureMerge);
  }
  unite(stream.frontier, event.nodes);
  return cudaSuccess;
}

cudaError_t refuse_in_capture() {
  if (capture_mode() == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  bool refused = false;
  for (const auto& one : captures()) {
    const CapturePtr capture = one.lock();
    if (capture == nullptr || streams_of(capture).empty()) continue;
    const bool is_own = capture->thread == std::this_thread::get_id();
    const bool minds = is_own ? capture->mode != cudaStreamCaptureModeRelaxed
                              : capture_mode() == cudaStreamCaptureModeGlobal &&
                                    capture->mode == cudaStreamCaptureModeGlobal;
    if (minds) refused = capture->is_invalid = true;
  }
  return refused ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

cudaError_t refuse_on_captured(Stream& stream) {
  if (stream.capture != nullptr)
    return invalidate(*stream.capture, cudaErrorStreamCaptureUnsupported);
  if (stream.is_default && captures_blocking_stream(stream.device))
    return cudaErrorStreamCaptureImplicit;
  return refuse_in_capture();
}

}  // namespace longspan::simulated

using namespace longspan::simulated;

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  return call("cudaStreamBeginCapture", [&](Lock&) {
    Stream* const stream = find_stream(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    return begin_capture(*stream, mode);
  });
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  return call("cudaStreamEndCapture", [&](Lock&) {
    Stream* const stream = find_stream(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (graph == nullptr) return cudaErrorInvalidValue;
    return end_capture(*stream, graph);
  });
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  return call("cudaStreamIsCapturing", [&](Lock&) {
    Stream* const stream = find_stream(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (status == nullptr) return cudaErrorInvalidValue;
    if (stream->is_default && captures_blocking_stream(stream->device))
      return cudaErrorStreamCaptureImplicit;
    *status = stream->capture == nullptr    ? cudaStreamCaptureStatusNone
              : stream->capture->is_invalid ? cudaStreamCaptureStatusInvalidated
                                            : cudaStreamCaptureStatusActive;
    return cudaSuccess;
  });
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  return call("cudaThreadExchangeStreamCaptureMode", [&](Lock&) {
    if (mode == nullptr) return cudaErrorInvalidValue;
    std::swap(*mode, capture_mode());
    return cudaSuccess;
  });
}

}  // extern "C"
