// Runs `longspan verify`: families of problems against the float64 oracle, on this many ranks.
#pragma once

#include "launcher/options/options.hpp"
#include "longspan/communicator.hpp"

namespace longspan::launcher {

/// Runs the families and returns the exit status. Collective.
int verify(const Communicator& control, const CommandLine& line);

}  // namespace longspan::launcher
