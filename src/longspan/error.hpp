/// \file
/// Typed errors. Every message says what was asked, what was found, and what to do. The library
/// throws them and never exits or prints. The `longspan` command exits with the kind's number.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace longspan {

/// What went wrong; the value is the exit status of the `longspan` command.
enum class ErrorKind : int {
  internal = 1,      ///< a defect of longspan
  usage = 2,         ///< options that make no sense, or that differ between ranks
  input = 3,         ///< tensors or files that do not fit together or cannot be read or written
  unsupported = 4,   ///< this build, device or strategy cannot do what was asked for by name
  wrong_result = 5,  ///< verification found values outside the tolerance
  rank_failure = 6,  ///< a rank died or reported an error
  timeout = 7,       ///< a rank did not arrive within the deadline
  backend = 8,       ///< CUDA, NCCL or MPI reported an error
};

/// Base of all errors that longspan throws. what() says what was asked, what was found and what to
/// do.
class Error : public std::runtime_error {
 public:
  /// An error of that kind and text.
  Error(ErrorKind kind, const std::string& what) : std::runtime_error(what), kind_(kind) {}
  /// The kind of the error.
  ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

/// Options that make no sense, or arguments that differ between ranks.
struct UsageError : Error {
  /// An error with that text.
  explicit UsageError(const std::string& what) : Error(ErrorKind::usage, what) {}
};

/// Tensors, arrays or files that do not fit together. Nothing was written or queued.
struct InputError : Error {
  /// An error with that text.
  explicit InputError(const std::string& what) : Error(ErrorKind::input, what) {}
};

/// Something that this build, device or strategy cannot do; the text names it and what can.
struct Unsupported : Error {
  /// An error with that text.
  explicit Unsupported(const std::string& what) : Error(ErrorKind::unsupported, what) {}
};

/// An error that CUDA, NCCL or MPI reported, or a failed allocation.
struct BackendError : Error {
  /// An error with that text.
  explicit BackendError(const std::string& what) : Error(ErrorKind::backend, what) {}
};

/// A peer that died (rank_failure) or did not arrive in time (timeout), and the step it missed.
class RankError : public Error {
 public:
  /// `kind` is rank_failure or timeout.
  RankError(ErrorKind kind, int rank, std::string step, const std::string& what)
      : Error(kind, what), rank_(rank), step_(std::move(step)) {}
  /// The peer; -1 if the transport cannot tell which it was.
  int rank() const noexcept { return rank_; }
  /// The step that the peer missed, as messages name it.
  const std::string& step() const noexcept { return step_; }

 private:
  int rank_;
  std::string step_;
};

}  // namespace longspan
