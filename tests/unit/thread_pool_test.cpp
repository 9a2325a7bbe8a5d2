// The pool of the host kernels: every item once, whoever takes it; and where the system starts
// fewer threads than were asked for, a pool of fewer, not a hang.
#include "kernels/host/thread_pool.hpp"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>
#include <vector>

namespace longspan::kernels::host {
namespace {

/// Whether a pool of `threads` does 1,000 items once each.
bool works(ThreadPool& pool) {
  std::vector<std::atomic<int>> times(1000);
  for (int run = 0; run < 3; ++run)
    pool.run(1000, [&](std::int64_t item, int thread) {
      if (thread >= 0 && thread < pool.size()) ++times[item];
    });
  for (const std::atomic<int>& n : times)
    if (n != 3) return false;
  return true;
}

TEST(ThreadPool, EveryItemOnce) {
  for (int threads : {1, 2, 7}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.size(), threads);
    EXPECT_TRUE(works(pool));
  }
}

// Short runs behind each other find the workers awake, falling asleep, or asleep.
TEST(ThreadPool, ShortRuns) {
  ThreadPool pool(4);
  std::atomic<int> sum = 0;
  int wanted = 0;
  for (int run = 0; run < 3000; ++run) {
    if (run % 10 == 0) std::this_thread::sleep_for(std::chrono::microseconds(run % 300));
    const int items = 2 + run % 5;
    pool.run(items, [&](std::int64_t item, int) { sum += static_cast<int>(item) + 1; });
    wanted += items * (items + 1) / 2;
    ASSERT_EQ(sum, wanted) << "run " << run;
  }
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

/// Address space of this process, in bytes.
long address_space() {
  long pages = 0;
  std::FILE* file = std::fopen("/proc/self/statm", "r");
  if (file == nullptr || std::fscanf(file, "%ld", &pages) != 1) pages = 0;
  if (file != nullptr) std::fclose(file);
  return pages * sysconf(_SC_PAGESIZE);
}

/// A child with room for the stacks of some threads. A deadline of its own ends it where it hangs.
TEST(ThreadPool, MakesDoWithTheThreadsThatStart) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(60);
    const auto room = static_cast<rlim_t>(address_space() + (300 << 20));
    const rlimit limit{room, room};
    if (setrlimit(RLIMIT_AS, &limit) != 0) _exit(10);
    ThreadPool pool(4000);
    if (pool.size() >= 4000) _exit(11);
    if (!works(pool)) _exit(12);
    // What is left is enough to work with.
    std::vector<char> memory(64 << 20, 1);
    _exit(memory.back() == 1 ? 0 : 13);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status)) << "ended by signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

#endif

}  // namespace
}  // namespace longspan::kernels::host
