// Linked into every test of a simulated build: each test has its own schedule and inputs. The first
// of a program is that of LONGSPAN_SIMULATED_SEED, and with --gtest_repeat each repetition takes
// the next; a failing test prints its own.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

#include "kernels/simulated/machine.hpp"
#include "tests/support/fresh_seed.hpp"
#include "tests/support/reduced.hpp"

namespace longspan::tests {
namespace {

class Schedules final : public ::testing::EmptyTestEventListener {
  void OnTestIterationStart(const ::testing::UnitTest&, int iteration) override {
    if (iteration == 0) first_ = simulated::schedule_seed();
    seed_ = first_ + static_cast<std::uint64_t>(iteration);
  }
  void OnTestStart(const ::testing::TestInfo&) override {
    simulated::begin_schedule(seed_);
    repeated_seeds().emplace(static_cast<unsigned>(seed_));
    if (!full_) reduction().emplace(seed_);
  }
  void OnTestEnd(const ::testing::TestInfo& test) override {
    if (reduction() && reduction()->left_out_all() && !test.result()->Skipped())
      ADD_FAILURE() << "all cases are too large for the simulator: give the test a reduced() size";
    if (test.result()->Failed())
      std::printf("This schedule again: LONGSPAN_SIMULATED_SEED=%llu --gtest_filter=%s.%s\n",
                  static_cast<unsigned long long>(seed_), test.test_suite_name(), test.name());
  }

  std::uint64_t first_ = 0, seed_ = 0;
  const bool full_ = std::getenv("LONGSPAN_FULL_GRID") != nullptr;
};

const bool kListens = [] {
  ::testing::UnitTest::GetInstance()->listeners().Append(new Schedules);
  return true;
}();

}  // namespace
}  // namespace longspan::tests
