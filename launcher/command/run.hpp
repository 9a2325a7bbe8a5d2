// Runs `longspan run`: computes, times, checks and writes one problem.
#pragma once

#include "launcher/options/options.hpp"
#include "longspan/communicator.hpp"

namespace longspan::launcher {

/// Runs the problem and returns the exit status. Collective.
int run(const Communicator& control, const CommandLine& line);

}  // namespace longspan::launcher
