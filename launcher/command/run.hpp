// Runs `longspan run`: one problem is computed, timed, checked and written.
#pragma once

#include "launcher/options/options.hpp"
#include "longspan/communicator.hpp"

namespace longspan::launcher {

/// Runs the problem and returns the exit status. It is collective.
int run(const Communicator& control, const CommandLine& line);

}  // namespace longspan::launcher
