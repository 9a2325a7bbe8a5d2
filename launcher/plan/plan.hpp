// Runs `longspan plan`: predicts the time on a cluster of every strategy, also between nodes with
// heads shared inside them. Only the model of forecast() runs.
#pragma once

#include "launcher/options/options.hpp"
#include "longspan/communicator.hpp"

namespace longspan::launcher {

/// Prints the plan on rank 0 and returns the exit status. Collective.
int plan(const Communicator& control, const CommandLine& line);

}  // namespace longspan::launcher
