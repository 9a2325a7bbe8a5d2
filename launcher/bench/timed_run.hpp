// Chooses the strategy of a run, and times it.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "launcher/bench/replays.hpp"
#include "launcher/io/progress.hpp"
#include "launcher/judge/report.hpp"
#include "launcher/problem/problem.hpp"
#include "longspan/communicator.hpp"
#include "longspan/machine.hpp"
#include "longspan/strategy.hpp"

namespace longspan::launcher {

/// The predicted time of every strategy, by the constants of a machine.
struct Prediction {
  std::vector<Forecast> forecasts;
  Machine machine;
};

/// Predicts the run by every strategy, and replaces "auto" by the strategy that it chooses.
/// Collective.
Prediction settle_strategy(const Communicator& world, Problem& problem);

/// The constants by which layers on these ranks choose. Collective.
Machine constants_of(const Communicator& world);

/// Times `iterations` runs, after `warmup` others, and shows how many are done with a `progress`.
/// Collective.
std::vector<Sample> time_runs(const Communicator& world, Trial& trial, int warmup, int iterations,
                              Progress* progress = nullptr);

/// Times a run captured in a graph, replayed back to back: the host's time to launch it is not
/// counted. The phases are those of a launched run. Collective, and for GPUs.
std::vector<Sample> time_graph(const Communicator& world, Trial& trial, int warmup, int iterations);

/// Takes, element by element, the largest value of the ranks. Collective.
std::vector<double> largest(const Communicator& world, const std::vector<double>& mine,
                            const std::string& step);

/// The milliseconds of each of `iterations` replays, after at least one and `warmup` others. The
/// host waits between them, by `wait`, after the first and where many would outlast the deadline.
/// Collective.
std::vector<double> time_replays(const Communicator& world, Replays& replays, int warmup,
                                 int iterations, std::chrono::milliseconds deadline,
                                 const std::function<void()>& wait);

}  // namespace longspan::launcher
