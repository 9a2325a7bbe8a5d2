#include "kernels/simulated/runtime/waiting.hpp"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "kernels/simulated/runtime/operations.hpp"

namespace longspan::simulated {
namespace {

using namespace std::chrono_literals;

constexpr unsigned kMostStepsOfQuery = 64;
constexpr int kSlicesOfStep = 32;  // until other threads get a turn
constexpr auto kTurn = 1ms;        // of the thread that runs the GPUs

bool has_other_processes = false;
bool is_over = false;           // main has ended, and static objects are about to be destroyed
std::thread::id ending_thread;  // that ends the process

/// After this the machine is not used any more; the process ends, on any thread.
void end_with_the_process() {
  [[maybe_unused]] static const int once = std::atexit([] {
    const Lock lock(machine_mutex());
    is_over = true;
    ending_thread = std::this_thread::get_id();
  });
}

/// True: this thread ends the process and need not wait. Other threads block until the end.
bool is_past_the_end(Lock& lock) {
  if (!is_over) return false;
  if (std::this_thread::get_id() == ending_thread) return true;
  lock.unlock();
  for (;;) std::this_thread::sleep_for(1h);
}

/// Naps of growing length, for a thread that waits for another thread or process.
class Naps {
 public:
  void nap() {
    if (count_++ < 20) return std::this_thread::yield();
    std::this_thread::sleep_for(std::min<std::chrono::microseconds>(count_ * 2us, 500us));
  }
  void begin_again() { count_ = 0; }

 private:
  int count_ = 0;
};

void let_others_in(Lock& lock) {
  if (!machine_mutex().is_wanted()) return;
  lock.unlock();
  lock.lock();
}

void wait(Lock& lock, const std::function<bool()>& until, bool for_others) {
  Naps naps;
  end_with_the_process();
  for (unsigned steps = 1; !until(); ++steps) {
    if (is_past_the_end(lock)) return;
    if (operations().step(kSlicesOfStep)) {
      naps.begin_again();
      let_others_in(lock);
      // Kernels that spin for another process's words occupy the CPU that it needs.
      if (has_other_processes && steps % (256 / kSlicesOfStep) == 0) std::this_thread::yield();
      continue;
    }
    if (until()) break;
    // If a process waits for no other process, no other can help it.
    if (!for_others && !has_other_processes && !operations().waits_for_others())
      report_standstill();
    lock.unlock();
    naps.nap();
    lock.lock();
  }
  order_kernels_before_host();
}

void let_gpus_go_on() {
  for (;;) {
    std::this_thread::sleep_for(kTurn);
    Lock lock(machine_mutex(), std::try_to_lock);
    if (!lock) continue;
    if (is_over) return;
    const auto end = std::chrono::steady_clock::now() + kTurn;
    while (operations().step() && std::chrono::steady_clock::now() < end) let_others_in(lock);
  }
}

}  // namespace

void wait(Lock& lock, const std::function<bool()>& until) { wait(lock, until, false); }
void wait_for_others(Lock& lock, const std::function<bool()>& until) { wait(lock, until, true); }

void go_on_a_little(const std::function<bool()>& until) {
  unsigned left = pick(kMostStepsOfQuery) + 1;
  do {
    if (operations().step()) continue;
    // No other process could move a kernel that stands still, though the caller might poll forever.
    if (!until() && operations().runs_kernels() && !has_other_processes &&
        !operations().waits_for_others())
      report_standstill();
    break;
  } while (--left > 0 && !until());
  if (until()) order_kernels_before_host();
}

void meet_other_processes() {
  if (has_other_processes) return;
  has_other_processes = true;
  use_host_clock();
  end_with_the_process();
  std::thread(let_gpus_go_on).detach();
}

}  // namespace longspan::simulated
