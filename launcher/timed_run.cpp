#include "launcher/timed_run.hpp"

#include <chrono>

#include "launcher/world.hpp"

namespace longspan::launcher {

std::vector<Forecast> settle_strategy(const Communicator& world, Problem& problem) {
  std::vector<Forecast> all;
  together(world, "choice of the strategy", [&] {
    int& per_node = problem.options.ranks_per_node;
    if (per_node == 0) per_node = world.ranks_per_node();
    const Options options = problem.layer_options(world.size());
    const Machine machine = shared_machine(world);
    problem.options.strategy = choose_strategy(options, world.size(), machine).name;
    all = forecast(options, {world.size(), per_node}, problem.run_size(world.size()), machine);
  });
  return all;
}

std::vector<Sample> time_runs(const Communicator& world, Trial& trial, int warmup, int iterations) {
  for (int i = 0; i < warmup; ++i) trial.run();
  world.barrier("start of the timed runs");
  std::vector<Sample> samples;
  for (int i = 0; i < iterations; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    trial.run();
    const std::chrono::duration<double, std::milli> elapsed =
        std::chrono::steady_clock::now() - begin;
    // On a GPU the marks on the stream leave out the host's part of launching and waiting.
    const Phases phases = trial.layer().phases();
    const bool gpu = world.device() == Device::cuda;
    samples.push_back({gpu ? phases.total() : elapsed.count(), phases});
  }
  return samples;
}

}  // namespace longspan::launcher
