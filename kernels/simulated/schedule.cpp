// The decisions of a seed: how warps and lanes are chosen, and when operations in flight happen.
#include <cmath>
#include <cstdlib>
#include <random>

#include "kernels/simulated/state.hpp"
#include "src/base/env.hpp"

namespace longspan::simulated {
namespace {

std::mt19937_64 generator{1};
Schedule now;
std::uint64_t seed_now = 0;

double unit() { return static_cast<double>(generator() >> 11) * 0x1p-53; }
template <class T>
T one_of(std::initializer_list<T> choices) {
  return choices.begin()[pick(static_cast<unsigned>(choices.size()))];
}

}  // namespace

unsigned pick(unsigned below) { return static_cast<unsigned>((generator() >> 32) * below >> 32); }
bool chance(double probability) {
  return probability >= 1 || (probability > 0 && unit() < probability);
}

Rarely yields, changes;
void Rarely::begin(double probability) {
  probability_ = probability;
  if (probability <= 0)
    left_ = ~std::uint64_t{0};
  else if (probability >= 1)
    left_ = 0;
  else
    left_ = static_cast<std::uint64_t>(std::log(1 - unit()) / std::log(1 - probability));
}

const Schedule& schedule() {
  if (seed_now == 0) schedule_seed();
  return now;
}
std::uint64_t schedule_seed() {
  if (seed_now == 0) {
    const auto seed = env_text("LONGSPAN_SIMULATED_SEED");
    begin_schedule(seed ? std::strtoull(seed->c_str(), nullptr, 0) : 1);
  }
  return seed_now;
}

bool exact_tensor_cores() {
  static const bool exact = env_text("LONGSPAN_SIMULATED_EXACT").has_value();
  return exact;
}

void begin_schedule(std::uint64_t seed) {
  seed_now = seed == 0 ? 1 : seed;
  now = {};
  generator.seed(seed_now * 0x9e3779b97f4a7c15u);
  begin_turns();
  yields.begin(0);
  changes.begin(0);
  if (seed_now == 1) return;  // in order, and everything at once: the fastest, for a debugger
  using Policy = Schedule::Policy;
  now.policy = one_of(
      {Policy::in_order, Policy::random, Policy::random, Policy::priorities, Policy::priorities});
  now.yield = one_of({0.0, 0.002, 0.02, 0.2});
  now.land = one_of({0.0, 0.0, 0.002, 0.02, 0.2, 1.0});
  now.burst = one_of({0.0, 0.5, 0.9});
  now.deliver = one_of({0.0, 0.01, 0.1, 1.0});
  now.change = one_of({0.0005, 0.005, 0.05});
  now.shuffled_blocks = chance(0.5);
  now.shuffled_lanes = chance(0.7);
  yields.begin(now.yield);
  changes.begin(now.change);
}

}  // namespace longspan::simulated
