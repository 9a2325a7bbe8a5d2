#include "launcher/io/progress.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>

namespace longspan::launcher {

Progress::Progress(bool shown) : shown_(shown && ::isatty(STDERR_FILENO)) {}

void Progress::print(const std::string& what) {
  if (!shown_) return;
  fmt::print(stderr, "\r\033[K{}", what);
  std::fflush(stderr);
  dirty_ = true;
  last_ = std::chrono::steady_clock::now();
}

void Progress::count(const char* what, std::int64_t done, std::int64_t total) {
  constexpr std::chrono::milliseconds kBetween{250};
  if (!shown_ || std::chrono::steady_clock::now() - last_ < kBetween) return;
  print(fmt::format("{}: {} of {}", what, done, total));
}

void Progress::clear() {
  if (!dirty_) return;
  std::fputs("\r\033[K", stderr);
  std::fflush(stderr);
  dirty_ = false;
}

}  // namespace longspan::launcher
