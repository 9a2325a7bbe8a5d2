// How long, and how, to wait for another rank. At first the poll is repeated at once (a peer on
// another core answers within microseconds), then the core is yielded to whoever else needs it, and
// at last the thread sleeps, so that many ranks on few cores do not slow the one they wait for.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

namespace longspan::comm {

using std::chrono::milliseconds;

class Patience {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Patience(milliseconds limit)
      : begin_(Clock::now()), idle_since_(begin_), limit_(limit) {}

  /// Is called after a poll that found nothing.
  void pause() {
    using namespace std::chrono_literals;
    now_ = Clock::now();
    const auto idle = now_ - idle_since_;
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
    now_ = Clock::now();
    const auto idle = now_ - idle_since_;
    if (idle < 20us) return;
    sleep(std::clamp<milliseconds>(std::chrono::duration_cast<milliseconds>(idle / 16), 1ms, 20ms));
    now_ = Clock::now();
  }

  /// Is called after a poll that found something.
  void progress() { idle_since_ = now_ = Clock::now(); }

  milliseconds waited() const { return std::chrono::duration_cast<milliseconds>(now_ - begin_); }
  bool over() const { return now_ - begin_ >= limit_; }

 private:
  Clock::time_point begin_;
  Clock::time_point idle_since_;
  Clock::time_point now_ = begin_;
  milliseconds limit_;
};

}  // namespace longspan::comm
