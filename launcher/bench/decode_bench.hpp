// Runs `longspan bench decode`: the decode step of a sharded cache is checked, timed, and compared
// with one rank alone.
#pragma once

#include "launcher/options/options.hpp"
#include "longspan/communicator.hpp"

namespace longspan::launcher {

/// Runs the benchmark and returns the exit status. It is collective.
int bench_decode(const Communicator& control, const CommandLine& line);

}  // namespace longspan::launcher
