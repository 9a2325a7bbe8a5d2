// The time of a call. On CUDA the calls are captured in a graph, which is replayed between events.
// So the host's time to launch a kernel is not counted. On the host, a steady clock.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <vector>

#include "longspan/types.hpp"
#ifdef LONGSPAN_HAVE_CUDA
#include "launcher/bench/graph.hpp"
#endif

namespace longspan::bench {

/// Microseconds of one call.
struct Times {
  double median = 0, least = 0;
  double spread = 0;  // the middle half of the times / their median
  int count = 0;

  static Times of(std::vector<double> us) {
    std::sort(us.begin(), us.end());
    const std::size_t n = us.size();
    return {us[n / 2], us[0], (us[3 * n / 4] - us[n / 4]) / us[n / 2], static_cast<int>(n)};
  }
};

/// work(i, stream): the i-th call, i < launches; calls may go to different memory.
using Work = std::function<void(int, Stream)>;

/// How often: at least `repeats` times, more while they fit in the budget.
struct Effort {
  int launches = 10;  // in a graph
  int repeats = 30;
  double budget_us = 3e5;

  int count(double one_us) const {
    return std::clamp(static_cast<int>(budget_us / std::max(one_us, 1.0)), repeats, 1000);
  }
};

inline double host_us(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  const std::chrono::duration<double, std::micro> elapsed =
      std::chrono::steady_clock::now() - begin;
  return elapsed.count();
}

inline Times host_times(const Work& work, const Effort& effort) {
  work(0, {});
  const int count = effort.count(host_us([&] { work(0, {}); }));
  std::vector<double> us;
  for (int i = 0; i < count; ++i) us.push_back(host_us([&] { work(i % effort.launches, {}); }));
  return Times::of(us);
}

#ifdef LONGSPAN_HAVE_CUDA

inline Times cuda_times(const Work& work, const Effort& effort) {
  const launcher::GpuStream stream;
  work(0, as_stream(stream.get()));
  launcher::cuda_ok(cudaStreamSynchronize(stream.get()), "first call");

  launcher::Graph graph(stream.get(), [&](Stream capturing) {
    for (int i = 0; i < effort.launches; ++i) work(i, capturing);
  });
  const auto replayed_us = [&] {
    graph.replay(1);
    return graph.milliseconds()[0] * 1e3;
  };
  for (int i = 0; i < 2; ++i) replayed_us();
  const int count = effort.count(replayed_us());
  std::vector<double> us;
  for (int i = 0; i < count / 5; ++i) replayed_us();
  for (int i = 0; i < count; ++i) us.push_back(replayed_us() / effort.launches);
  return Times::of(us);
}

#endif

inline Times times(Device device, const Work& work, const Effort& effort) {
#ifdef LONGSPAN_HAVE_CUDA
  if (device == Device::cuda) return cuda_times(work, effort);
#else
  (void)device;
#endif
  return host_times(work, effort);
}

}  // namespace longspan::bench
