#include "launcher/bench/replays.hpp"

#include "launcher/problem/demand.hpp"

#include <unistd.h>

#include <chrono>
#include <utility>

#if defined(LONGSPAN_HAVE_CUDA)
#include <optional>

#include "launcher/bench/graph.hpp"
#endif

namespace longspan::launcher {
namespace {

class HostReplays final : public Replays {
 public:
  explicit HostReplays(std::function<void(Stream)> work) : work_(std::move(work)) {}

  void queue(int count) override {
    times_.clear();
    for (int i = 0; i < count; ++i) {
      const auto begin = std::chrono::steady_clock::now();
      work_({});
      const std::chrono::duration<double, std::milli> elapsed =
          std::chrono::steady_clock::now() - begin;
      times_.push_back(elapsed.count());
    }
  }
  std::vector<double> milliseconds() const override { return times_; }

 private:
  std::function<void(Stream)> work_;
  std::vector<double> times_;
};

}  // namespace

#if defined(LONGSPAN_HAVE_CUDA)

namespace {

class GpuReplays final : public Replays {
 public:
  GpuReplays(cudaStream_t stream, const std::function<void(Stream)>& work) : graph_(stream, work) {}
  void queue(int count) override { graph_.replay(count); }
  std::vector<double> milliseconds() const override { return graph_.milliseconds(); }

 private:
  Graph graph_;
};

}  // namespace

struct Queue::Impl {
  std::optional<GpuStream> gpu;
};

Queue::Queue(Device device) : impl_(std::make_unique<Impl>()) {
  if (device == Device::cuda) impl_->gpu.emplace();
}
Stream Queue::stream() const { return impl_->gpu ? as_stream(impl_->gpu->get()) : Stream{}; }
std::unique_ptr<Replays> Queue::repeat(std::function<void(Stream)> work) const {
  if (impl_->gpu) return std::make_unique<GpuReplays>(impl_->gpu->get(), work);
  return std::make_unique<HostReplays>(std::move(work));
}

#else

struct Queue::Impl {};

Queue::Queue(Device) {}
Stream Queue::stream() const { return {}; }
std::unique_ptr<Replays> Queue::repeat(std::function<void(Stream)> work) const {
  return std::make_unique<HostReplays>(std::move(work));
}

#endif

Queue::~Queue() = default;

std::size_t free_memory(Device device) {
#if defined(LONGSPAN_HAVE_CUDA)
  if (device == Device::cuda) {
    std::size_t free = 0, total = 0;
    cuda_ok(cudaMemGetInfo(&free, &total), "look at the free memory");
    return free;
  }
#else
  (void)device;
#endif
  const double free =
      static_cast<double>(sysconf(_SC_AVPHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  return static_cast<std::size_t>(std::min(free, available_memory()));
}

}  // namespace longspan::launcher
