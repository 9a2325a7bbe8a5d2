// The pools of the host kernels: every item once, on any thread; one set of threads in a process,
// for all callers; and where the system starts fewer threads than requested, a smaller pool, not a
// hang.
#include "kernels/host/thread_pool.hpp"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <iterator>
#include <stdexcept>
#include <thread>
#include <vector>

#include "longspan/attention.hpp"
#include "longspan/communicator.hpp"
#include "longspan/serving.hpp"

namespace longspan::kernels::host {
namespace {

/// Whether a pool does 1,000 items once each.
bool works(const ThreadPool& pool) {
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

// Short runs after each other find the workers awake, falling asleep, or asleep.
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

int threads_of_process() {
  namespace fs = std::filesystem;
  return static_cast<int>(
      std::distance(fs::directory_iterator("/proc/self/task"), fs::directory_iterator()));
}

/// Each used to have its own threads, and 16 layers 240 of them.
TEST(ThreadPool, LayersOfAProcessShareItsThreads) {
  const int before = threads_of_process();
  {
    std::vector<Attention> layers;
    for (int i = 0; i < 16; ++i)
      layers.emplace_back(self(), Options{.heads = 1 + i, .head_dim = 8, .threads = 5});
    const ServingOps calls(Device::host, 3);
    const ThreadPool two(2);
    EXPECT_EQ(threads_of_process(), before + 4);
    const ThreadPool nine(9);
    EXPECT_EQ(threads_of_process(), before + 8);
    EXPECT_TRUE(works(two));
    EXPECT_TRUE(works(nine));
  }
  EXPECT_EQ(threads_of_process(), before);
}

/// Several threads run at once, by one pool and by several, some of them from inside an item.
TEST(ThreadPool, NoRunWaitsForAnother) {
  const ThreadPool shared(3);
  std::atomic<int> met = 0, done = 0;
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c)
    callers.emplace_back([&, c] {
      const ThreadPool own(2 + c);
      for (const ThreadPool* pool : {&shared, &own}) {
        // The first item of each caller waits until all callers are within a run.
        pool->run(50, [&](std::int64_t item, int) {
          if (item == 0) {
            ++met;
            while (met % 4 != 0) std::this_thread::yield();
          }
          if (item % 10 == 3)
            own.run(5, [&](std::int64_t, int) { ++done; });
          else
            ++done;
        });
        while (done < 4 * 70 * (pool == &shared ? 1 : 2)) std::this_thread::yield();
      }
      EXPECT_TRUE(works(shared));
    });
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(done, 2 * 4 * 70);
}

TEST(ThreadPool, WhatTheCallerThrowsEndsTheRun) {
  const ThreadPool pool(4);
  for (int i = 0; i < 200; ++i) {
    std::atomic<bool> thrown = false;
    EXPECT_THROW(pool.run(1000,
                          [&](std::int64_t, int thread) {
                            if (thread == 0) {
                              thrown = true;
                              throw std::runtime_error("between");
                            }
                            while (!thrown) std::this_thread::yield();  // some are left for it
                          }),
                 std::runtime_error);
  }
  EXPECT_TRUE(works(pool));
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

/// A child has none of its parent's threads. Pools from before the fork have new ones, and end.
TEST(ThreadPool, WorksInTheChildOfAFork) {
  auto pool = std::make_unique<ThreadPool>(4);
  const ThreadPool kept(2);
  ASSERT_TRUE(works(*pool));
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(60);
    if (threads_of_process() != 1) _exit(10);
    if (!works(kept) || threads_of_process() != 2) _exit(11);
    if (!works(*pool) || threads_of_process() != 4) _exit(12);
    pool.reset();
    if (!works(kept)) _exit(13);
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status)) << "ended by signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_TRUE(works(*pool));
}

/// Address space of this process, in bytes.
long address_space() {
  long pages = 0;
  std::FILE* file = std::fopen("/proc/self/statm", "r");
  if (file == nullptr || std::fscanf(file, "%ld", &pages) != 1) pages = 0;
  if (file != nullptr) std::fclose(file);
  return pages * sysconf(_SC_PAGESIZE);
}

/// A child with room for the stacks of some threads. Its own deadline ends it where it hangs.
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
    // The rest is enough to work with.
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
