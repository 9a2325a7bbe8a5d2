// The process's threads that wait for work, and the pools through which layers share them. The
// caller works too. Items are handed out one at a time, so the result of an item must not depend on
// the thread that computes it.
#pragma once

#include <algorithm>
#include <cstdint>

namespace longspan::kernels::host {

/// A claim to a number of threads. All pools of a process share the same threads, as many as the
/// largest asks for, which end with the last pool. After a fork the child starts its own when it
/// first needs them.
class ThreadPool {
 public:
  /// Starts the missing threads; `threads` counts the caller. There are fewer if the system starts
  /// no more (size()).
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return size_; }

  /// Calls work(item, thread) for each item in [0, items), thread in [0, size()); returns when all
  /// are done. The caller is thread 0. If it throws, its first exception is rethrown here, and the
  /// remaining items are not done. Workers must not throw. Several threads may call run at once, on
  /// one pool or several: none waits for another, since each does those of its own items that no
  /// worker has taken.
  template <class Work>
  void run(std::int64_t items, const Work& work) const {
    run(items, &work, [](const void* context, std::int64_t item, int thread) {
      (*static_cast<const Work*>(context))(item, thread);
    });
  }

  /// Calls work(begin, end) for stretches of [0, rows).
  template <class Work>
  void run_stretches(std::int64_t rows, const Work& work) const {
    constexpr std::int64_t kRows = 64;  // of a stretch
    run((rows + kRows - 1) / kRows,
        [&](std::int64_t item, int) { work(item * kRows, std::min(rows, (item + 1) * kRows)); });
  }

 private:
  using ItemFunction = void (*)(const void* context, std::int64_t item, int thread);

  void run(std::int64_t items, const void* context, ItemFunction call) const;

  const bool is_shared_;
  int size_ = 1;
};

}  // namespace longspan::kernels::host
