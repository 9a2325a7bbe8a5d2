// Runs `longspan calibrate`: measures the constants of machine.hpp with runs of the library itself,
// and saves them where choose_strategy finds them.
#pragma once

#include "launcher/options/options.hpp"
#include "longspan/communicator.hpp"

namespace longspan::launcher {

/// Measures for some ten seconds and returns the exit status. Collective.
int calibrate(const Communicator& control, const CommandLine& line);

}  // namespace longspan::launcher
