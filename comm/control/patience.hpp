// How long, and how, to wait for another rank. At first the poll is repeated at once (a peer on
// another core answers within microseconds), then the core is yielded to whoever else needs it, and
// at last the thread sleeps, so that many ranks on few cores do not slow the one they wait for.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>
#include <utility>

namespace longspan::comm {

using std::chrono::milliseconds;

/// Counts how long a thread has waited. From one poll to the next no more than kMostAtOnce counts:
/// a process that was stopped, with its machine perhaps, has not waited meanwhile, and must not
/// blame others for its own silence.
class Patience {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr milliseconds kMostAtOnce{100};

  explicit Patience(milliseconds limit) : seen_(Clock::now()), limit_(limit) {}

  /// Is called after a poll that found nothing.
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

  /// Is called likewise by a caller that can be woken: sleep(limit) may return earlier.
  template <class Sleep>
  void pause(const Sleep& sleep) {
    using namespace std::chrono_literals;
    count();
    const auto idle = waited_ - busy_until_;
    if (idle < 20us) return;
    sleep(std::clamp<milliseconds>(std::chrono::duration_cast<milliseconds>(idle / 16), 1ms, 20ms));
    count();
  }

  /// Is called after a poll that found something.
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

/// Whom a rank asks while it waits, ten times a second at most, whether it is to give up (see
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
