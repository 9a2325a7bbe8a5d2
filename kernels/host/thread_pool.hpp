// A few threads that wait for work. The caller works too; items are handed out one at a time, so
// what an item computes must not depend on the thread that computes it.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace longspan::kernels::host {

class ThreadPool {
 public:
  /// Starts threads; `threads` counts the caller. There are fewer where the system starts no more
  /// (size()).
  explicit ThreadPool(int threads);
  ~ThreadPool();

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  /// Calls work(item, thread) for each item in [0, items), thread in [0, size()); returns when all
  /// are done. `work` must not throw. There is one run at a time: other callers wait.
  template <class Work>
  void run(std::int64_t items, const Work& work) {
    run(items, &work, [](const void* context, std::int64_t item, int thread) {
      (*static_cast<const Work*>(context))(item, thread);
    });
  }

  /// Calls work(begin, end) for stretches of [0, rows).
  template <class Work>
  void run_stretches(std::int64_t rows, const Work& work) {
    constexpr std::int64_t kRows = 64;  // of a stretch
    run((rows + kRows - 1) / kRows,
        [&](std::int64_t item, int) { work(item * kRows, std::min(rows, (item + 1) * kRows)); });
  }

 private:
  using Call = void (*)(const void* context, std::int64_t item, int thread);

  void run(std::int64_t items, const void* context, Call call);
  void dismiss(std::size_t keep);  // keeps the first `keep` workers only
  void drain(int thread);
  void serve(int thread);

  std::vector<std::thread> workers_;
  std::mutex run_mutex_;

  std::mutex mutex_;  // guards what follows; what is atomic is looked at without it, too
  std::condition_variable wake_, done_;
  std::atomic<std::uint64_t> run_{0};
  bool open_ = false;                                       // workers may still join the run
  std::atomic<int> most_{std::numeric_limits<int>::max()};  // workers of higher numbers leave
  std::atomic<int> active_{0};

  /// Items that a thread takes first: in the next run they are its own again, and what they read
  /// may still be in its cache. Then it takes those that others have left.
  struct alignas(64) Share {
    std::atomic<std::int64_t> next{0};
    std::int64_t end = 0;
  };
  std::unique_ptr<Share[]> shares_;  // [threads]
  const void* context_ = nullptr;
  Call call_ = nullptr;
};

}  // namespace longspan::kernels::host
