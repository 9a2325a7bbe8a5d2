// A run is open while items are left. A worker takes items of the first open run that has room for
// it; one that wakes too late finds none and goes back to sleep, so that a caller waits only for
// workers that took an item. That matters when the machine has more threads than cores. No caller
// waits for another's run, so what a run calls between its items may wait for other threads.
//
// To wake a sleeping thread takes as long as the attention of some hundred tokens. So a worker
// stays awake for a moment behind a run, in which the next one often comes, and the caller for a
// moment behind its own last item; both let others have the core meanwhile.
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

/// Waits awake until `is_due`, but not for long.
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
  using Call = void (*)(const void* context, std::int64_t item, int thread);

  Run(std::int64_t items, int threads, const void* context, Call call)
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

  /// Does items until none is left that nobody has taken.
  void drain(int thread) {
    const int own = static_cast<int>(std::int64_t{thread} * share_count_ / threads_);
    for (int i = 0; i < share_count_; ++i) {
      Share& share = shares_[(own + i) % share_count_];
      for (std::int64_t item;
           (item = share.next.fetch_add(1, std::memory_order_relaxed)) < share.end;)
        call_(context_, item, thread);
    }
  }

  /// Takes the items that nobody has taken, and does not do them.
  void give_up() {
    for (int s = 0; s < share_count_; ++s) shares_[s].next = shares_[s].end;
  }

  // These are the crew's, and guarded by its mutex; `active` is looked at without it, too.
  Run* next = nullptr;         // in the list of open runs
  bool is_open = false;        // in the list
  std::atomic<int> active{0};  // workers that take items

 private:
  static constexpr int kMostShares = 64;  // with more threads some begin with the same one

  /// Items that a thread takes first: in the next run they are its own again, and what they read
  /// may still be in its cache. Then it takes those that others have left.
  struct alignas(64) Share {
    std::atomic<std::int64_t> next{0};
    std::int64_t end = 0;
  };
  Share shares_[kMostShares];
  const void* const context_;
  const Call call_;
  const int threads_;
  const int share_count_;
};

/// The workers, which have the numbers 1, 2, ...
class Crew {
 public:
  ~Crew() { dismiss(0); }

  /// With the caller.
  int size() const { return size_; }
  int asked_for() const { return asked_for_; }

  /// Starts the workers that are missing to so many threads. Its calls come one at a time.
  void grow(int threads) {
    if (asked_for_ < threads) asked_for_ = threads;
    try {
      while (size_ < threads) {
        const int number = size_;
        workers_.emplace_back([this, number] { serve(number); });
        ++size_;
      }
    } catch (const std::exception&) {
      // The system starts no more threads, or has no memory for one. The number is a matter of
      // speed alone, so the crew makes do with half of those that started: what fills a process to
      // its limit leaves no room for the work itself.
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

  /// Takes a run out of the list. The caller has the mutex.
  void close(Run& run) {
    if (!run.is_open) return;
    run.is_open = false;
    Run** at = &open_;
    while (*at != &run) at = &(*at)->next;
    *at = run.next;
  }

  /// The first open run that takes worker `number`. The caller has the mutex.
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
      close(*run);  // nothing is left of it to take
      if (--run->active == 0) done_.notify_all();
    }
  }

  std::vector<std::thread> workers_;
  std::atomic<int> size_{1}, asked_for_{1};

  std::mutex mutex_;  // guards what follows; what is atomic is looked at without it, too
  std::condition_variable wake_, done_;
  Run* open_ = nullptr;                                     // in the order in which they came
  std::atomic<std::uint64_t> posted_{0};                    // runs, ever
  std::atomic<int> most_{std::numeric_limits<int>::max()};  // workers of higher numbers leave
};

/// What the pools of a process share. It is the one global of the library, since what there is once
/// in a process has no other owner; it is never destroyed, since threads may outlive main.
class Process {
 public:
  static Process& here() {
    static Process* const process = make();
    return *process;
  }

  /// A pool begins; gives the threads that it has.
  int enter(int threads) {
    const std::lock_guard lock(mutex_);
    ++pools_;
    return std::min(threads, grown(threads).size());
  }

  /// A pool ends. The last one ends the threads.
  void leave() {
    Crew* last = nullptr;
    {
      const std::lock_guard lock(mutex_);
      if (--pools_ == 0) last = crew_.exchange(nullptr);
    }
    delete last;
  }

  /// The threads, for a pool that lives and has so many. They are missing after a fork alone.
  Crew& crew(int threads) {
    Crew* const crew = crew_;
    if (crew != nullptr && crew->asked_for() >= threads) return *crew;
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

  /// In the child of a fork the threads are not there, and what they held stays held: their crew is
  /// never touched again.
  void leave_crew() {
    if (Crew* const crew = crew_.exchange(nullptr)) left_behind_ = crew;
  }

  std::mutex mutex_;
  std::atomic<Crew*> crew_{nullptr};
  Crew* left_behind_ = nullptr;  // so that it is no leak
  int pools_ = 0;
};

}  // namespace

ThreadPool::ThreadPool(int threads) : is_shared_(threads > 1) {
  if (is_shared_) size_ = Process::here().enter(threads);
}

ThreadPool::~ThreadPool() {
  if (is_shared_) Process::here().leave();
}

void ThreadPool::run(std::int64_t items, const void* context, Call call) const {
  if (size_ == 1 || items <= 1) {
    for (std::int64_t item = 0; item < items; ++item) call(context, item, 0);
    return;
  }
  Run all(items, size_, context, call);
  Process::here().crew(size_).run(all);
}

}  // namespace longspan::kernels::host
