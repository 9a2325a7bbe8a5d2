// Chooses the strategy of a run, and times it.
#pragma once

#include <vector>

#include "launcher/problem.hpp"
#include "launcher/report.hpp"
#include "longspan/communicator.hpp"
#include "longspan/strategy.hpp"

namespace longspan::launcher {

/// Predicts the run by every strategy, and puts the one that "auto" stands for in its place. It is
/// collective.
std::vector<Forecast> settle_strategy(const Communicator& world, Problem& problem);

/// Times `iterations` runs, after `warmup` others. It is collective.
std::vector<Sample> time_runs(const Communicator& world, Trial& trial, int warmup, int iterations);

}  // namespace longspan::launcher
