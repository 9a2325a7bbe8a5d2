// Fibers: stacks between which one host thread switches. Sanitizers are informed of each switch.
#pragma once

#include <cstddef>

namespace longspan::simulated {

/// A stack and its saved position. The first switch to it calls `entry`, which never returns.
class Fiber {
 public:
  using Entry = void (*)();

  Fiber() = default;
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  void begin(Entry entry);
  /// Returns the stack to the free ones.
  void end();

  /// Switches from the scheduler to this fiber, until it calls `leave`.
  void enter();
  /// Switches from this running fiber to the scheduler. `for_good`: it never runs again.
  void leave(bool for_good);
  /// Switches from this running fiber directly to another one, without the scheduler.
  void hand_over(Fiber& next, bool for_good);
  /// Every entry must call this first.
  static void arrive();

 private:
  void* stack_pointer_ = nullptr;
  char* stack_ = nullptr;
  void* context_ = nullptr;     // of ThreadSanitizer
  void* fake_stack_ = nullptr;  // of AddressSanitizer
};

}  // namespace longspan::simulated
