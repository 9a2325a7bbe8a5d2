// Why a communicator ended. The first failure is kept: every later call throws it again, and the
// other ranks are told it, so that all of them end with the same error.
#pragma once

#include <optional>
#include <string>

#include "longspan/error.hpp"

namespace longspan::comm {

struct Failure {
  ErrorKind kind = ErrorKind::internal;
  int rank = -1;  // the rank that is to blame; -1: not known
  std::string step;
  std::string what;
};

/// A RankError, or a BackendError where the kind says so.
[[noreturn]] void throw_failure(const Failure& failure);

std::string to_text(const Failure& failure);
Failure failure_from(const std::string& text);

class Fate {
 public:
  bool failed() const { return first_.has_value(); }

  /// Keeps the first failure and throws it.
  [[noreturn]] void fail(const Failure& failure) {
    note(failure);
    throw_failure(*first_);
  }
  void note(const Failure& failure) {
    if (!first_) first_ = failure;
  }
  void check() const {
    if (first_) throw_failure(*first_);
  }

 private:
  std::optional<Failure> first_;
};

}  // namespace longspan::comm
