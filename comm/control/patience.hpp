// How to wait for another rank, and how long. At first the wait polls at once (a peer on another
// core answers within microseconds). Then it yields the core to other threads, and at last it
// sleeps, so that many ranks on few cores do not slow the rank that they wait for.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>
#include <utility>

namespace longspan::comm {

using std::chrono::milliseconds;

/// Counts how long a thread has waited. Between two polls at most kMostAtOnce counts: a process
/// that was stopped, perhaps with its machine, did not wait meanwhile, and must not blame others
/// for its own silence.
class Patience {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr milliseconds kMostAtOnce{100};

  explicit Patience(milliseconds limit) : seen_(Clock::now()), limit_(limit) {}

  /// Called after a poll that found nothing.
  void pause() {
    using namespace std::chrono_literals;
    count();
    const auto idle = waited_ - busy_until_;
    if (idle < 20us) return;
    if (idle < 2ms)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(std::clamp<Clock::duration>(idle / 64, 50us, 1ms));
  }

  /// The same for a caller that can be woken: sleep(limit) may return earlier.
  template <class Sleep>
  void pause(const Sleep& sleep) {
    using namespace std::chrono_literals;
    count();
    const auto idle = waited_ - busy_until_;
    if (idle < 20us) return;
    sleep(std::clamp<milliseconds>(std::chrono::duration_cast<milliseconds>(idle / 16), 1ms, 20ms));
    count();
  }

  /// Called after a poll that found something.
  void progress() {
    count();
    busy_until_ = waited_;
  }

  milliseconds waited() const { return std::chrono::duration_cast<milliseconds>(waited_); }
  bool over() const { return waited_ >= limit_; }

 private:
  void count() {
    const Clock::time_point now = Clock::now();
    waited_ += std::min<Clock::duration>(now - seen_, kMostAtOnce);
    seen_ = now;
  }

  Clock::time_point seen_;
  Clock::duration waited_{};
  Clock::duration busy_until_{};
  milliseconds limit_;
};

/// The callback that a waiting rank asks, at most ten times a second, whether to give up (see
/// Communicator::on_wait).
class GivesUp {
 public:
  GivesUp() = default;
  explicit GivesUp(std::function<bool()> ask) : ask_(std::move(ask)) {}
  const std::function<bool()>& ask() const { return ask_; }

  bool now() {
    if (!ask_) return false;
    const auto time = Patience::Clock::now();
    if (time - asked_ < milliseconds(100)) return false;
    asked_ = time;
    return ask_();
  }

 private:
  std::function<bool()> ask_;
  Patience::Clock::time_point asked_{};
};

}  // namespace longspan::comm
