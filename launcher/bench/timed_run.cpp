#include "launcher/bench/timed_run.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "launcher/problem/world.hpp"

namespace longspan::launcher {

Prediction settle_strategy(const Communicator& world, Problem& problem) {
  Prediction made;
  together(world, "choice of the strategy", [&] {
    int& per_node = problem.options.ranks_per_node;
    if (per_node == 0) per_node = world.ranks_per_node();
    const Options options = problem.layer_options(world.size());
    made.machine = shared_machine(world);
    problem.options.strategy = choose_strategy(options, world.size(), made.machine).name;
    made.forecasts =
        forecast(options, {world.size(), per_node}, problem.run_size(world.size()), made.machine);
  });
  return made;
}

Machine constants_of(const Communicator& world) {
  Machine machine;
  together(world, "constants of the machine", [&] { machine = shared_machine(world); });
  return machine;
}

std::vector<Sample> time_runs(const Communicator& world, Trial& trial, int warmup, int iterations,
                              Progress* progress) {
  const auto show = [&](int done) {
    if (progress) progress->count("runs", done, std::int64_t{warmup} + iterations);
  };
  for (int i = 0; i < warmup; ++i) {
    show(i);
    trial.run();
  }
  world.barrier("start of the timed runs");
  std::vector<Sample> samples;
  for (int i = 0; i < iterations; ++i) {
    show(warmup + i);
    using Milliseconds = std::chrono::duration<double, std::milli>;
    const auto begin = std::chrono::steady_clock::now();
    trial.forward();
    const auto middle = std::chrono::steady_clock::now();
    if (trial.goes_back()) trial.backward();
    const Milliseconds backward = std::chrono::steady_clock::now() - middle;
    const Milliseconds elapsed = middle - begin;
    // On a GPU the marks on the stream exclude the host's time to launch and wait.
    const Phases phases = trial.layer().phases();
    const bool gpu = world.device() == Device::cuda;
    samples.push_back({gpu ? phases.total() : elapsed.count(), phases, backward.count()});
  }
  return samples;
}

std::vector<Sample> time_graph(const Communicator& world, Trial& trial, int warmup,
                               int iterations) {
  trial.run();
  const Phases phases = trial.layer().phases();
  trial.poison();
  const Queue queue(world.device());
  const auto replays = queue.repeat([&](Stream stream) { trial.queue(stream); });
  const auto wait = [&] { trial.layer().wait(queue.stream()); };
  std::vector<Sample> samples;
  for (const double ms : time_replays(world, *replays, warmup, iterations, world.deadline(), wait))
    samples.push_back({ms, phases});
  return samples;
}

std::vector<double> largest(const Communicator& world, const std::vector<double>& mine,
                            const std::string& step) {
  std::vector<double> most = mine;
  for (const std::string& text : world.gather(nlohmann::json(mine).dump(), step)) {
    const auto theirs = nlohmann::json::parse(text).get<std::vector<double>>();
    for (std::size_t i = 0; i < most.size(); ++i) most[i] = std::max(most[i], theirs[i]);
  }
  return most;
}

std::vector<double> time_replays(const Communicator& world, Replays& replays, int warmup,
                                 int iterations, std::chrono::milliseconds deadline,
                                 const std::function<void()>& wait) {
  replays.queue(1);
  wait();
  const double one = largest(world, replays.milliseconds(), "time of the first replay")[0];
  const int most =
      static_cast<int>(std::clamp(static_cast<double>(deadline.count()) / 4 / one, 1.0, 1000.0));
  std::vector<double> times;
  for (int left = warmup - 1 + iterations; left > 0; left -= most) {
    replays.queue(std::min(left, most));
    wait();
    for (const double ms : replays.milliseconds()) times.push_back(ms);
  }
  times.erase(times.begin(), times.end() - iterations);
  return times;
}

}  // namespace longspan::launcher
