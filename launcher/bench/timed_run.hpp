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

/// What every strategy is predicted to take, by the constants of a machine.
struct Prediction {
  std::vector<Forecast> forecasts;
  Machine machine;
};

/// Predicts the run by every strategy, and puts the one that "auto" stands for in its place. It is
/// collective.
Prediction settle_strategy(const Communicator& world, Problem& problem);

/// The constants by which layers on these ranks choose. It is collective.
Machine constants_of(const Communicator& world);

/// Times `iterations` runs, after `warmup` others, and shows how many are done where there is a
/// `progress`. It is collective.
std::vector<Sample> time_runs(const Communicator& world, Trial& trial, int warmup, int iterations,
                              Progress* progress = nullptr);

/// Times a run that a graph has captured, replayed back to back: what the host does to launch it is
/// not counted. The phases are those of a run that was launched. It is collective, and for GPUs.
std::vector<Sample> time_graph(const Communicator& world, Trial& trial, int warmup, int iterations);

/// Takes, element by element, the largest value of the ranks. It is collective.
std::vector<double> largest(const Communicator& world, const std::vector<double>& mine,
                            const std::string& step);

/// Gives the milliseconds of each of `iterations` replays, after `warmup` others, one at least. The
/// host waits between them, by `wait`, behind the first and where many would outlast the deadline.
/// It is collective.
std::vector<double> time_replays(const Communicator& world, Replays& replays, int warmup,
                                 int iterations, std::chrono::milliseconds deadline,
                                 const std::function<void()>& wait);

}  // namespace longspan::launcher
