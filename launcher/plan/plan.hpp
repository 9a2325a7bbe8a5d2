// Runs `longspan plan`: what every strategy, and every strategy between nodes with heads shared
// inside of them, is predicted to take on a cluster. Nothing runs but the model of forecast().
#pragma once

#include "launcher/options/options.hpp"
#include "longspan/communicator.hpp"

namespace longspan::launcher {

/// Prints the plan on rank 0 and returns the exit status. It is collective.
int plan(const Communicator& control, const CommandLine& line);

}  // namespace longspan::launcher
