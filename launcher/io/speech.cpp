#include "launcher/io/speech.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <string>

#include "longspan/error.hpp"

namespace longspan::launcher {
namespace {

/// One readable line. Messages contain the user's text: a name with a line break, with characters
/// that command a terminal, or of a hundred thousand letters.
std::string printable(std::string_view text) {
  constexpr std::size_t kFirst = 1500, kLast = 400;
  std::string line(text);
  if (text.size() > kFirst + kLast) line.replace(kFirst, text.size() - kFirst - kLast, " ... ");
  for (char& c : line)
    if (c == '\n' || c == '\t')
      c = ' ';
    else if (static_cast<unsigned char>(c) < ' ' || c == 127)
      c = '?';
  return line;
}

}  // namespace

void settle_streams() {
  for (int number : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(number, F_GETFD) >= 0) continue;
    // The lowest free number is this one. Standard output is opened for reading: a write there must
    // fail, as it does where it is closed.
    (void)!::open("/dev/null", number == STDERR_FILENO ? O_WRONLY : O_RDONLY);
  }
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
}

void print(std::string_view text, std::FILE* to) {
  errno = 0;
  if (std::fwrite(text.data(), 1, text.size(), to) == text.size() && std::fflush(to) == 0) return;
  throw InputError(fmt::format("standard {} cannot be written: {}",
                               to == stdout ? "output" : "error", std::strerror(errno)));
}

void complain(std::string_view text) noexcept {
  std::string one_line;
  try {
    one_line = printable(text);
    text = one_line;
  } catch (...) {  // no memory: printed unchanged
  }
  // One call writes the line and its end: ranks share the stream, and another rank's output must
  // not come between the two.
  char end = '\n';
  const iovec parts[] = {{const_cast<char*>(text.data()), text.size()}, {&end, 1}};
  (void)!::writev(STDERR_FILENO, parts, 2);
}

}  // namespace longspan::launcher
