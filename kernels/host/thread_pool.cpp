// A run is open while items are left. A worker that wakes too late finds it closed and goes back to
// sleep, so the caller waits only for workers that took an item. That matters when the machine has
// more threads than cores.
//
// To wake a sleeping thread takes as long as the attention of some hundred tokens. So a worker
// stays awake for a moment behind a run, in which the next one often comes, and the caller for a
// moment behind its own last item; both let others have the core meanwhile.
#include "kernels/host/thread_pool.hpp"

#include <chrono>
#include <exception>

namespace longspan::kernels::host {
namespace {

/// Waits awake until `is_due`, but not for long.
template <class IsDue>
void stay_awake(IsDue is_due) {
  using std::chrono::steady_clock;
  constexpr std::chrono::microseconds kLongest(100);
  for (const auto start = steady_clock::now(); !is_due() && steady_clock::now() - start < kLongest;)
    std::this_thread::yield();
}

}  // namespace

ThreadPool::ThreadPool(int threads) : shares_(new Share[std::max(threads, 1)]) {
  try {
    for (int thread = 1; thread < threads; ++thread)
      workers_.emplace_back([this, thread] { serve(thread); });
  } catch (const std::exception&) {
    // The system starts no more threads, or has no memory for one. The number is a matter of speed
    // alone, so the pool makes do with half of those that started: what fills a process to its
    // limit leaves no room for the work itself.
    dismiss(workers_.size() / 2);
  }
}

void ThreadPool::dismiss(std::size_t keep) {
  {
    const std::lock_guard lock(mutex_);
    most_ = static_cast<int>(keep);
  }
  wake_.notify_all();
  for (; workers_.size() > keep; workers_.pop_back()) workers_.back().join();
}

ThreadPool::~ThreadPool() { dismiss(0); }

void ThreadPool::run(std::int64_t items, const void* context, Call call) {
  if (workers_.empty() || items == 1) {
    for (std::int64_t item = 0; item < items; ++item) call(context, item, 0);
    return;
  }
  const std::lock_guard one_at_a_time(run_mutex_);
  {
    const std::lock_guard lock(mutex_);
    context_ = context;
    call_ = call;
    for (int thread = 0; thread < size(); ++thread) {
      shares_[thread].next = items * thread / size();
      shares_[thread].end = items * (thread + 1) / size();
    }
    open_ = true;
    ++run_;
  }
  wake_.notify_all();
  drain(0);
  stay_awake([this] { return active_ == 0; });
  std::unique_lock lock(mutex_);
  open_ = false;
  done_.wait(lock, [this] { return active_ == 0; });
}

void ThreadPool::drain(int thread) {
  for (int i = 0; i < size(); ++i) {
    Share& share = shares_[(thread + i) % size()];
    for (std::int64_t item;
         (item = share.next.fetch_add(1, std::memory_order_relaxed)) < share.end;)
      call_(context_, item, thread);
  }
}

void ThreadPool::serve(int thread) {
  std::uint64_t seen = 0;
  while (true) {
    stay_awake([&] { return run_ != seen || thread > most_; });
    std::unique_lock lock(mutex_);
    wake_.wait(lock, [&] { return thread > most_ || (open_ && run_ != seen); });
    if (thread > most_) return;
    seen = run_;
    ++active_;
    lock.unlock();
    drain(thread);
    lock.lock();
    if (--active_ == 0) done_.notify_one();
  }
}

}  // namespace longspan::kernels::host
