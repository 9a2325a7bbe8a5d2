// One line on a terminal with the current work, replaced by the next. Where standard error is a
// file or a pipe there is none, so that programs read the same output as before.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace longspan::launcher {

class Progress {
 public:
  /// Shows lines where `speaks`, on one rank of all, and standard error is a terminal.
  explicit Progress(bool shown);
  /// Clears the line for later output.
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void print(const std::string& what);
  /// Shows that `done` of `total` are done. Most calls do nothing, so it may be called between runs
  /// that are timed.
  void count(const char* what, std::int64_t done, std::int64_t total);
  void clear();

 private:
  bool shown_, dirty_ = false;
  std::chrono::steady_clock::time_point last_{};
};

}  // namespace longspan::launcher
