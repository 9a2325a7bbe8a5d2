// Fibers: stacks between which one host thread switches. Sanitizers are told of each switch.
#pragma once

#include <cstddef>

namespace longspan::simulated {

/// A stack and where it stopped. The first switch to it calls `entry`, which never returns.
class Fiber {
 public:
  using Entry = void (*)();

  Fiber() = default;
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  void begin(Entry entry);
  /// The stack goes back to those that are free.
  void end();

  /// From the scheduler to this fiber, until it calls `leave`.
  void enter();
  /// From this fiber, which runs, to the scheduler. `for_good`: it never runs again.
  void leave(bool for_good);
  /// From this fiber, which runs, to another one, past the scheduler.
  void hand_over(Fiber& next, bool for_good);
  /// Called first by every entry.
  static void arrive();

 private:
  void* stack_pointer_ = nullptr;
  char* stack_ = nullptr;
  void* context_ = nullptr;     // of ThreadSanitizer
  void* fake_stack_ = nullptr;  // of AddressSanitizer
};

}  // namespace longspan::simulated
