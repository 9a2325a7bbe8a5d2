// Watches queued work that no thread waits for. A thread looks at the oldest piece, and aborts
// where it does not finish within the deadline, which frees the queue. Pieces finish in the order
// of queueing; the clock of each starts when the one before it is done.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

namespace longspan::comm {

class Watchdog {
 public:
  struct Duties {
    std::chrono::milliseconds deadline;
    int slots = 256;                // most pieces watched at once
    std::function<void()> prepare;  // called once on the watchdog's thread, before all else
    std::function<bool(int)> done;  // whether the work in this slot is done; must not block
    std::function<void()> abort;    // called at most once, on the watchdog's thread; may block
  };

  /// Throws BackendError where no thread can be started.
  explicit Watchdog(Duties duties);
  /// Waits at most a few seconds for a running abort, then leaves it alone.
  ~Watchdog();

  /// The slot for the next piece of work, or nothing while all are taken: older work then keeps
  /// watch over the same queue.
  std::optional<int> free_slot() const;
  /// Watches work queued at `step`, which has ended when done(slot) is true; `slot` is from
  /// free_slot. `open` work is still being queued by a call that may block, and has not ended
  /// before close(slot).
  void watch(int slot, const char* step, bool open = false);
  void close(int slot);

  /// The step whose work did not finish, if the deadline has passed for any.
  std::optional<std::string> expired() const;

  /// Aborts now, without waiting for the end of the abort.
  void abort();

 private:
  struct State;
  static void run(const std::shared_ptr<State>& state);
  std::shared_ptr<State> state_;  // shared with the thread, which may outlive this
};

}  // namespace longspan::comm
