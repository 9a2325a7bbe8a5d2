// Work that is queued again and again: on CUDA captured once on a stream of its own and replayed as
// a graph; on the host, where work is done at once, called again.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>
#include <utility>

#include "longspan/types.hpp"
#ifdef LONGSPAN_HAVE_CUDA
#include <cuda_runtime_api.h>

#include "longspan/cuda.hpp"
#endif

namespace longspan::testing {

class Replay {
 public:
  Replay(Device device, std::function<void(Stream)> work)
      : on_gpu_(device == Device::cuda), work_(std::move(work)) {
#ifdef LONGSPAN_HAVE_CUDA
    if (on_gpu_) ok(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
#endif
  }
  Replay(const Replay&) = delete;
  Replay& operator=(const Replay&) = delete;
  ~Replay() {
#ifdef LONGSPAN_HAVE_CUDA
    if (exec_ != nullptr) cudaGraphExecDestroy(exec_);
    if (graph_ != nullptr) cudaGraphDestroy(graph_);
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
#endif
  }

  Stream stream() const {
#ifdef LONGSPAN_HAVE_CUDA
    return on(stream_);
#else
    return {};
#endif
  }

  /// Queues the work itself, behind what the default stream was given.
  void eager() {
    settle();
    work_(stream());
  }

  /// The same out of a graph, which the first call captures.
  void again() {
    settle();
#ifdef LONGSPAN_HAVE_CUDA
    if (on_gpu_) {
      if (exec_ == nullptr) capture();
      ok(cudaGraphLaunch(exec_, stream_), "launch of the graph");
      return;
    }
#endif
    work_(stream());
  }

 private:
  void settle() {
#ifdef LONGSPAN_HAVE_CUDA
    if (on_gpu_) ok(cudaDeviceSynchronize(), "copies");
#endif
  }

#ifdef LONGSPAN_HAVE_CUDA
  static void ok(cudaError_t status, const char* what) {
    if (status != cudaSuccess)
      throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
  }
  void capture() {
    ok(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "begin of the capture");
    work_(stream());
    ok(cudaStreamEndCapture(stream_, &graph_), "end of the capture");
    ok(cudaGraphInstantiate(&exec_, graph_, 0), "making of the graph");
  }

  cudaStream_t stream_ = nullptr;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
#endif
  bool on_gpu_;
  std::function<void(Stream)> work_;
};

}  // namespace longspan::testing
