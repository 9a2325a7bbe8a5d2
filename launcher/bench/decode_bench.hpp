// Runs `longspan bench decode`: checks and times the decode step of a sharded cache, and compares
// it with one rank alone.
#pragma once

#include "launcher/options/options.hpp"
#include "longspan/communicator.hpp"

namespace longspan::launcher {

/// Runs the benchmark and returns the exit status. Collective.
int bench_decode(const Communicator& control, const CommandLine& line);

}  // namespace longspan::launcher
