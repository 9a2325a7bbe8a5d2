// Work that is queued repeatedly: on CUDA captured once on its own stream and replayed as a graph;
// on the host, where work is done at once, called again.
#pragma once

#include <functional>
#include <optional>
#include <utility>

#include "longspan/types.hpp"
#ifdef LONGSPAN_HAVE_CUDA
#include "launcher/bench/graph.hpp"
#endif

namespace longspan::tests {

class Replay {
 public:
  Replay(Device device, std::function<void(Stream)> work) : work_(std::move(work)) {
#ifdef LONGSPAN_HAVE_CUDA
    if (device == Device::cuda) gpu_.emplace();
#else
    (void)device;
#endif
  }

  Stream stream() const {
#ifdef LONGSPAN_HAVE_CUDA
    if (gpu_) return as_stream(gpu_->get());
#endif
    return {};
  }

  /// Queues the work itself, after the work of the default stream.
  void eager() {
    settle();
    work_(stream());
  }

  /// The same as a graph, which the first call captures.
  void again() {
    settle();
#ifdef LONGSPAN_HAVE_CUDA
    if (gpu_) {
      if (!graph_) graph_.emplace(gpu_->get(), work_);
      graph_->replay(1);
      return;
    }
#endif
    work_(stream());
  }

 private:
  void settle() {
#ifdef LONGSPAN_HAVE_CUDA
    if (gpu_) launcher::cuda_ok(cudaDeviceSynchronize(), "end of the copies");
#endif
  }

#ifdef LONGSPAN_HAVE_CUDA
  std::optional<launcher::GpuStream> gpu_;
  std::optional<launcher::Graph> graph_;  // is destroyed before its stream
#endif
  std::function<void(Stream)> work_;
};

}  // namespace longspan::tests
