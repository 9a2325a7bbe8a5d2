// GoogleTest on many ranks without MPI: `test --ranks=N` forks them. Rank 0 prints. At the end of
// each test every rank tells every other its failures, so that a failure anywhere fails the test
// everywhere. The first process relays these messages; a rank that does not come to it, or ends
// before the others, ends the job.
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "tests/tcp/ranks.hpp"

namespace longspan::tests {
namespace {

constexpr int kLimit_ms = 100'000;  // longer than any deadline inside a test

int rank = 0, size = 1, to_first = -1;

bool write_all(int fd, const void* from, std::size_t bytes) {
  const auto* place = static_cast<const char*>(from);
  while (bytes > 0) {
    const ssize_t sent = ::send(fd, place, bytes, MSG_NOSIGNAL);
    if (sent <= 0) return false;
    place += sent;
    bytes -= static_cast<std::size_t>(sent);
  }
  return true;
}

bool read_all(int fd, void* to, std::size_t bytes) {
  auto* place = static_cast<char*>(to);
  while (bytes > 0) {
    pollfd wait{fd, POLLIN, 0};
    if (::poll(&wait, 1, kLimit_ms) <= 0) return false;
    const ssize_t got = ::recv(fd, place, bytes, 0);
    if (got <= 0) return false;
    place += got;
    bytes -= static_cast<std::size_t>(got);
  }
  return true;
}

bool write_text(int fd, const std::string& text) {
  const std::uint64_t bytes = text.size();
  return write_all(fd, &bytes, sizeof bytes) && write_all(fd, text.data(), bytes);
}

bool read_text(int fd, std::string& text) {
  std::uint64_t bytes = 0;
  if (!read_all(fd, &bytes, sizeof bytes)) return false;
  text.resize(bytes);
  return read_all(fd, text.data(), bytes);
}

/// Passes texts on until all ranks have ended well; false when one does not come.
bool serve(const std::vector<int>& ranks) {
  for (;;) {
    std::vector<std::string> texts(ranks.size());
    std::size_t came = 0;
    for (std::size_t p = 0; p < ranks.size(); ++p) came += read_text(ranks[p], texts[p]);
    if (came == 0) return true;
    if (came < ranks.size()) return false;
    for (const int fd : ranks)
      for (const std::string& text : texts)
        if (!write_text(fd, text)) return false;
  }
}

/// Runs before GoogleTest's own printer at the end of a test, so what it adds still counts.
class Verdict final : public ::testing::EmptyTestEventListener {
  void OnTestStart(const ::testing::TestInfo&) override { failures_.clear(); }

  void OnTestPartResult(const ::testing::TestPartResult& part) override {
    if (part.failed())
      failures_ += std::string(part.file_name() ? part.file_name() : "?") + ":" +
                   std::to_string(part.line_number()) + ": " + part.message() + "\n";
  }

  void OnTestEnd(const ::testing::TestInfo&) override {
    const auto texts = tell_all(failures_);
    for (int p = 0; p < size; ++p)
      if (p != rank && !texts[p].empty()) ADD_FAILURE() << "on rank " << p << ":\n" << texts[p];
  }

  std::string failures_;
};

int run_rank() {
  auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
  if (rank != 0) delete listeners.Release(listeners.default_result_printer());
  listeners.Append(new Verdict);
  return RUN_ALL_TESTS();
}

int run_job() {
  std::vector<pid_t> pids;
  std::vector<int> ends;
  for (rank = 0; rank < size; ++rank) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0) return 1;
    const pid_t pid = fork();
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      for (const int end : ends) ::close(end);
      ::close(pair[0]);
      to_first = pair[1];
      std::exit(run_rank());
    }
    ::close(pair[1]);
    pids.push_back(pid);
    ends.push_back(pair[0]);
  }
  const bool well = serve(ends);
  int result = well ? 0 : 1;
  for (int p = 0; p < size; ++p) {
    if (!well) kill(pids[p], SIGKILL);
    int status = 0;
    waitpid(pids[p], &status, 0);
    if (status != 0) result = 1;
  }
  if (!well) std::fprintf(stderr, "a rank did not come: the job was ended\n");
  return result;
}

}  // namespace

int own_rank() { return rank; }
int all_ranks() { return size; }

std::vector<std::string> tell_all(const std::string& mine) {
  std::vector<std::string> texts(size);
  bool well = write_text(to_first, mine);
  for (std::string& text : texts) well = well && read_text(to_first, text);
  if (!well) {
    std::fprintf(stderr, "rank %d: another rank ended, or did not come\n", rank);
    std::_Exit(1);
  }
  return texts;
}

}  // namespace longspan::tests

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i)
    if (std::strncmp(argv[i], "--ranks=", 8) == 0) longspan::tests::size = std::atoi(argv[i] + 8);
  return longspan::tests::run_job();
}
