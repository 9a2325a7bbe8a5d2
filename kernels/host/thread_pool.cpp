// A run is open while items are left. A worker that wakes too late finds it closed and goes back to
// sleep, so the caller waits only for workers that took an item: what matters when the machine has
// more threads than cores.
#include "kernels/host/thread_pool.hpp"

namespace longspan::kernels::host {

ThreadPool::ThreadPool(int threads) {
  for (int thread = 1; thread < threads; ++thread)
    workers_.emplace_back([this, thread] { serve(thread); });
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(std::int64_t items, const void* context, Call call) {
  if (workers_.empty() || items == 1) {
    for (std::int64_t item = 0; item < items; ++item) call(context, item, 0);
    return;
  }
  const std::lock_guard one_at_a_time(run_mutex_);
  {
    const std::lock_guard lock(mutex_);
    items_ = items;
    context_ = context;
    call_ = call;
    next_ = 0;
    open_ = true;
    ++run_;
  }
  wake_.notify_all();
  drain(0);
  std::unique_lock lock(mutex_);
  open_ = false;
  done_.wait(lock, [this] { return active_ == 0; });
}

void ThreadPool::drain(int thread) {
  for (std::int64_t item; (item = next_.fetch_add(1, std::memory_order_relaxed)) < items_;)
    call_(context_, item, thread);
}

void ThreadPool::serve(int thread) {
  std::uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [&] { return stop_ || (open_ && run_ != seen); });
    if (stop_) return;
    seen = run_;
    ++active_;
    lock.unlock();
    drain(thread);
    lock.lock();
    if (--active_ == 0) done_.notify_one();
  }
}

}  // namespace longspan::kernels::host
