// A run is open while items are left. A worker takes items of the first open run that has room for
// it. A worker that wakes too late finds none and goes back to sleep, so a caller waits only for
// workers that took an item. That matters when the machine has more threads than cores. No caller
// waits for another's run, so code that a run calls between its items may wait for other threads.
//
// Waking a sleeping thread takes as long as the attention of some hundred tokens. A worker
// therefore stays awake for a moment after a run, because the next one often follows at once, and
// the caller does so after its own last item. Both yield the core to others meanwhile.
#include "kernels/host/thread_pool.hpp"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <limits>
#include <mutex>
#include <thread>
#include <vector>

namespace longspan::kernels::host {
namespace {

/// Busy-waits until `is_due`, but not for long.
template <class IsDue>
void stay_awake(IsDue is_due) {
  using std::chrono::steady_clock;
  constexpr std::chrono::microseconds kLongest(100);
  for (const auto start = steady_clock::now(); !is_due() && steady_clock::now() - start < kLongest;)
    std::this_thread::yield();
}

/// The items of one call of ThreadPool::run, on the caller's stack.
class Run {
 public:
  using ItemFunction = void (*)(const void* context, std::int64_t item, int thread);

  Run(std::int64_t items, int threads, const void* context, ItemFunction call)
      : context_(context),
        call_(call),
        threads_(threads),
        share_count_(std::min(threads, kMostShares)) {
    for (int s = 0; s < share_count_; ++s) {
      shares_[s].next = items * s / share_count_;
      shares_[s].end = items * (s + 1) / share_count_;
    }
  }

  int threads() const { return threads_; }

  /// Does items until all are taken.
  void drain(int thread) {
    const int own = static_cast<int>(std::int64_t{thread} * share_count_ / threads_);
    for (int i = 0; i < share_count_; ++i) {
      Share& share = shares_[(own + i) % share_count_];
      for (std::int64_t item;
           (item = share.next.fetch_add(1, std::memory_order_relaxed)) < share.end;)
        call_(context_, item, thread);
    }
  }

  /// Takes the remaining items without doing them.
  void give_up() {
    for (int s = 0; s < share_count_; ++s) shares_[s].next = shares_[s].end;
  }

  // The crew's mutex guards these; `active` is also read without it.
  Run* next = nullptr;         // in the list of open runs
  bool is_open = false;        // in the list
  std::atomic<int> active{0};  // workers that take items

 private:
  static constexpr int kMostShares = 64;  // with more threads some begin with the same one

  /// Items that a thread takes first: they are the same in the next run, so what they read may
  /// still be in its cache. Then it takes items that others have left.
  struct alignas(64) Share {
    std::atomic<std::int64_t> next{0};
    std::int64_t end = 0;
  };
  Share shares_[kMostShares];
  const void* const context_;
  const ItemFunction call_;
  const int threads_;
  const int share_count_;
};

/// The workers, numbered 1, 2, ...
class Crew {
 public:
  ~Crew() { dismiss(0); }

  /// Including the caller.
  int size() const { return size_; }
  int requested() const { return requested_; }

  /// Starts workers up to `threads`. Calls must not overlap.
  void grow(int threads) {
    if (requested_ < threads) requested_ = threads;
    try {
      while (size_ < threads) {
        const int number = size_;
        workers_.emplace_back([this, number] { serve(number); });
        ++size_;
      }
    } catch (const std::exception&) {
      // The system starts no more threads, or has no memory for one. The number affects only speed,
      // so the crew keeps half of those that started: a process filled to its limit has no room for
      // the work itself.
      dismiss(workers_.size() / 2);
    }
  }

  void run(Run& run) {
    {
      const std::lock_guard lock(mutex_);
      Run** end = &open_;
      while (*end != nullptr) end = &(*end)->next;
      *end = &run;
      run.is_open = true;
      ++posted_;
    }
    wake_.notify_all();
    try {
      run.drain(0);
    } catch (...) {
      run.give_up();
      await_workers(run);
      throw;
    }
    await_workers(run);
  }

 private:
  void await_workers(Run& run) {
    stay_awake([&] { return run.active == 0; });
    std::unique_lock lock(mutex_);
    close(run);
    done_.wait(lock, [&] { return run.active == 0; });
  }

  /// Removes a run from the list. The caller holds the mutex.
  void close(Run& run) {
    if (!run.is_open) return;
    run.is_open = false;
    Run** at = &open_;
    while (*at != &run) at = &(*at)->next;
    *at = run.next;
  }

  /// The first open run that accepts worker `number`. The caller holds the mutex.
  Run* open_for(int number) const {
    for (Run* run = open_; run != nullptr; run = run->next)
      if (number < run->threads()) return run;
    return nullptr;
  }

  /// Keeps the first `keep` workers only.
  void dismiss(std::size_t keep) {
    {
      const std::lock_guard lock(mutex_);
      most_ = static_cast<int>(keep);
    }
    wake_.notify_all();
    for (; workers_.size() > keep; workers_.pop_back()) workers_.back().join();
    const std::lock_guard lock(mutex_);
    size_ = static_cast<int>(keep) + 1;
    most_ = std::numeric_limits<int>::max();
  }

  void serve(int number) {
    std::uint64_t seen = 0;
    while (true) {
      stay_awake([&] { return posted_ != seen || number > most_; });
      std::unique_lock lock(mutex_);
      Run* run = nullptr;
      wake_.wait(lock, [&] { return number > most_ || (run = open_for(number)) != nullptr; });
      if (number > most_) return;
      ++run->active;
      seen = posted_;
      lock.unlock();
      run->drain(number);
      lock.lock();
      close(*run);  // no items of it are left
      if (--run->active == 0) done_.notify_all();
    }
  }

  std::vector<std::thread> workers_;
  std::atomic<int> size_{1}, requested_{1};

  std::mutex mutex_;  // guards what follows; atomic members are also read without it
  std::condition_variable wake_, done_;
  Run* open_ = nullptr;                                     // in order of arrival
  std::atomic<std::uint64_t> posted_{0};                    // number of runs so far
  std::atomic<int> most_{std::numeric_limits<int>::max()};  // workers of higher numbers leave
};

/// State that the pools of a process share. It is the only global of the library, because state of
/// the whole process has no other owner. It is never destroyed, since threads may outlive main.
class Process {
 public:
  static Process& here() {
    static Process* const process = make();
    return *process;
  }

  /// Registers a pool, starts missing threads, and returns the pool's number of threads.
  int enter(int threads) {
    const std::lock_guard lock(mutex_);
    ++pools_;
    return std::min(threads, grown(threads).size());
  }

  /// Unregisters a pool. The last one ends the threads.
  void leave() {
    Crew* last = nullptr;
    {
      const std::lock_guard lock(mutex_);
      if (--pools_ == 0) last = crew_.exchange(nullptr);
    }
    delete last;
  }

  /// The threads, for a live pool of that size. They are missing only after a fork.
  Crew& crew(int threads) {
    Crew* const crew = crew_;
    if (crew != nullptr && crew->requested() >= threads) return *crew;
    const std::lock_guard lock(mutex_);
    return grown(threads);
  }

 private:
  static Process* make() {
    static Process& one = *new Process;
    pthread_atfork([] { one.mutex_.lock(); }, [] { one.mutex_.unlock(); },
                   [] {
                     one.leave_crew();
                     one.mutex_.unlock();
                   });
    return &one;
  }

  Crew& grown(int threads) {
    if (crew_ == nullptr) crew_ = new Crew;
    Crew& crew = *crew_;
    crew.grow(threads);
    return crew;
  }

  /// In the child of a fork the threads do not exist, and locks that they held stay locked: their
  /// crew is never touched again.
  void leave_crew() {
    if (Crew* const crew = crew_.exchange(nullptr)) left_behind_ = crew;
  }

  std::mutex mutex_;
  std::atomic<Crew*> crew_{nullptr};
  Crew* left_behind_ = nullptr;  // so that it is not a leak
  int pools_ = 0;
};

}  // namespace

ThreadPool::ThreadPool(int threads) : is_shared_(threads > 1) {
  if (is_shared_) size_ = Process::here().enter(threads);
}

ThreadPool::~ThreadPool() {
  if (is_shared_) Process::here().leave();
}

void ThreadPool::run(std::int64_t items, const void* context, ItemFunction call) const {
  if (size_ == 1 || items <= 1) {
    for (std::int64_t item = 0; item < items; ++item) call(context, item, 0);
    return;
  }
  Run all(items, size_, context, call);
  Process::here().crew(size_).run(all);
}

}  // namespace longspan::kernels::host
