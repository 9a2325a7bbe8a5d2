// Keeps why a communicator ended. The first failure is kept and sent to the other ranks, so that
// all end with the same error. The first call that meets the end throws it unchanged. Later calls
// throw the same type, with a note that the communicator had ended before: they may not have the
// argument that the failure names.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "longspan/error.hpp"

namespace longspan::comm {

struct Failure {
  ErrorKind kind = ErrorKind::internal;
  int rank = -1;  // the rank to blame; -1: unknown
  std::string step;
  std::string what;
};

/// A time in the form of messages: "2.5 s".
std::string seconds(std::chrono::milliseconds time);

/// Throws a RankError, or a BackendError or UsageError by its kind.
[[noreturn]] void throw_failure(const Failure& failure);

std::string to_text(const Failure& failure);
/// Reads a failure. Throws an internal Error for a text that to_text did not write.
Failure failure_from(const std::string& text);

/// Reads the whole of `text` as a number in [low, high]; throws an internal Error for anything
/// else.
long long number_from(const std::string& text, long long low, long long high);

/// Holds the failure of a communicator. Any thread may look, and the first failure that a thread
/// finds is kept. What was split from a communicator ends with it: an outcome has children.
class Outcome {
 public:
  bool failed() const { return failed_.load(std::memory_order_acquire); }

  /// Keeps the first failure and throws it.
  [[noreturn]] void fail(const Failure& failure) {
    note(failure);
    throw_first();
  }
  /// Keeps the first failure. Without memory its text is lost, but not the failure.
  void note(const Failure& failure) noexcept;
  /// Lets `child` end where this ends. `members` are, by its ranks, their ranks here.
  void add_child(const std::shared_ptr<Outcome>& child, std::vector<int> members);
  void check() {
    if (failed()) throw_first();
  }

 private:
  struct Child {
    std::weak_ptr<Outcome> outcome;
    std::vector<int> members;
  };
  [[noreturn]] void throw_first();
  static void propagate(const Failure& failure, const std::vector<Child>& children) noexcept;

  std::mutex mutex_;
  std::vector<Child> children_;
  std::atomic<bool> failed_{false};
  std::atomic<bool> thrown_{false};
  Failure first_;  // never written after failed_ is set
};

}  // namespace longspan::comm
