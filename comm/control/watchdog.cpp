#include "comm/control/watchdog.hpp"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "comm/control/threads.hpp"

namespace longspan::comm {

using Clock = std::chrono::steady_clock;

struct Watchdog::State {
  explicit State(Duties all)
      : duties(std::move(all)), steps(duties.slots), open(steps.size(), false) {}

  Duties duties;
  mutable std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::string> steps;  // a ring: pieces first, first + 1 ... first + count - 1
  std::vector<bool> open;          // by slot
  int first = 0;
  int count = 0;
  Clock::time_point since{};  // when the oldest piece became so
  std::string expired;        // the step whose time is over
  bool has_expired = false;
  bool abort = false;  // requested
  bool stop = false;
  bool ended = false;  // the thread has ended
};

Watchdog::Watchdog(Duties duties) : state_(std::make_shared<State>(std::move(duties))) {
  // A step's name must not allocate while work is queued.
  for (std::string& step : state_->steps) step.reserve(64);
  start_thread("the watch over queued work", [state = state_] { run(state); }).detach();
}

Watchdog::~Watchdog() {
  std::unique_lock lock(state_->mutex);
  state_->stop = true;
  state_->changed.notify_all();
  state_->changed.wait_for(lock, std::chrono::seconds(5), [&] { return state_->ended; });
}

std::optional<int> Watchdog::free_slot() const {
  const std::lock_guard lock(state_->mutex);
  if (state_->count == state_->duties.slots) return std::nullopt;
  return (state_->first + state_->count) % state_->duties.slots;
}

void Watchdog::watch(int slot, const char* step, bool open) {
  const std::lock_guard lock(state_->mutex);
  state_->steps[slot].assign(step);
  state_->open[slot] = open;
  if (state_->count++ == 0) state_->since = Clock::now();
}

void Watchdog::close(int slot) {
  const std::lock_guard lock(state_->mutex);
  state_->open[slot] = false;
}

std::optional<std::string> Watchdog::expired() const {
  const std::lock_guard lock(state_->mutex);
  return state_->has_expired ? std::optional(state_->expired) : std::nullopt;
}

void Watchdog::abort() {
  const std::lock_guard lock(state_->mutex);
  state_->abort = true;
  state_->changed.notify_all();
}

void Watchdog::run(const std::shared_ptr<State>& state) {
  State& s = *state;
  if (s.duties.prepare) s.duties.prepare();
  const auto period = std::clamp(s.duties.deadline / 50, std::chrono::milliseconds(1),
                                 std::chrono::milliseconds(100));
  std::unique_lock lock(s.mutex);
  bool aborted = false;
  while (!s.stop || (s.abort && !aborted)) {
    // A thread that queues work does not wake this one: a look now and then is cheaper.
    s.changed.wait_for(lock, period, [&] { return s.stop || (s.abort && !aborted); });
    while (!aborted && s.count > 0 && !s.open[s.first] && s.duties.done(s.first)) {
      s.first = (s.first + 1) % s.duties.slots;
      --s.count;
      s.since = Clock::now();
    }
    if (!aborted && s.count > 0 && Clock::now() - s.since >= s.duties.deadline) {
      if (!s.has_expired) s.expired.swap(s.steps[s.first]);  // a copy might fail for memory
      s.has_expired = s.abort = true;
    }
    if (s.abort && !aborted) {
      aborted = true;
      lock.unlock();
      s.duties.abort();
      lock.lock();
    }
  }
  // The duties hold memory of the owner, so they end before the owner learns of the end.
  s.duties = {};
  s.ended = true;
  s.changed.notify_all();
}

}  // namespace longspan::comm
