// Captures work in a CUDA graph, replays it, and times it by events on its stream, so that the
// host's time to launch kernels is not counted. Only in builds with CUDA.
//
//     GpuStream stream;
//     Graph graph(stream.get(), [&](Stream on) { layer.run(request, on); });
//     graph.replay(20);         queues all of them and returns
//     graph.milliseconds()      of each, once they are done
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <string>
#include <vector>

#include "longspan/cuda.hpp"
#include "longspan/error.hpp"

namespace longspan::launcher {

/// Throws where a call failed, and clears the runtime's last error.
inline void cuda_ok(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());
  throw BackendError(std::string(what) + " failed: " + cudaGetErrorString(status));
}

class GpuStream {
 public:
  GpuStream() {
    cuda_ok(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making of a stream");
  }
  ~GpuStream() { cudaStreamDestroy(stream_); }
  GpuStream(const GpuStream&) = delete;
  GpuStream& operator=(const GpuStream&) = delete;

  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

class Graph {
 public:
  /// Captures what `work` queues. The stream must outlive the graph.
  Graph(cudaStream_t stream, const std::function<void(Stream)>& work) : stream_(stream) {
    cudaGraph_t graph = nullptr;
    cuda_ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "begin of a capture");
    try {
      work(as_stream(stream));
    } catch (...) {
      if (cudaStreamEndCapture(stream, &graph) == cudaSuccess)
        cudaGraphDestroy(graph);
      else
        static_cast<void>(cudaGetLastError());  // the capture had failed before
      throw;
    }
    cuda_ok(cudaStreamEndCapture(stream, &graph), "end of a capture");
    const cudaError_t made = cudaGraphInstantiate(&replay_, graph, 0);
    cudaGraphDestroy(graph);
    cuda_ok(made, "making of a graph");
  }
  ~Graph() {
    for (cudaEvent_t mark : marks_) cudaEventDestroy(mark);
    cudaGraphExecDestroy(replay_);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  /// Queues `count` replays back to back, with a mark before, between and after them.
  void replay(int count) {
    while (static_cast<int>(marks_.size()) <= count) {
      cudaEvent_t mark = nullptr;
      cuda_ok(cudaEventCreate(&mark), "making of an event");
      marks_.push_back(mark);
    }
    cuda_ok(cudaEventRecord(marks_[0], stream_), "mark");
    for (int i = 0; i < count; ++i) {
      cuda_ok(cudaGraphLaunch(replay_, stream_), "replay of a graph");
      cuda_ok(cudaEventRecord(marks_[i + 1], stream_), "mark");
    }
    count_ = count;
  }

  /// The milliseconds of each of the last replays; blocks until they are done.
  std::vector<double> milliseconds() const {
    std::vector<double> times;
    if (count_ > 0) cuda_ok(cudaEventSynchronize(marks_[count_]), "replay of a graph");
    for (int i = 0; i < count_; ++i) {
      float ms = 0;
      cuda_ok(cudaEventElapsedTime(&ms, marks_[i], marks_[i + 1]), "time of a replay");
      times.push_back(ms);
    }
    return times;
  }

 private:
  cudaStream_t stream_;
  cudaGraphExec_t replay_ = nullptr;
  std::vector<cudaEvent_t> marks_;
  int count_ = 0;
};

}  // namespace longspan::launcher
