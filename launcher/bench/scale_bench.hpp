// Runs `longspan bench scale`: prefill, chunks and decode on more and more of the ranks, by every
// strategy that supports them. Each is checked, timed, and compared with one rank and with its
// forecast.
#pragma once

#include "launcher/options/options.hpp"
#include "longspan/communicator.hpp"

namespace longspan::launcher {

/// Runs the benchmark and returns the exit status. Collective.
int bench_scale(const Communicator& control, const CommandLine& line);

}  // namespace longspan::launcher
