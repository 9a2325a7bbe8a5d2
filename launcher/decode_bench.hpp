// `longspan bench decode`: the decode step of a sharded cache, checked, timed, and compared with
// one rank alone.
#pragma once

#include "launcher/options.hpp"
#include "longspan/communicator.hpp"

namespace longspan::launcher {

/// Returns the exit status. Collective.
int bench_decode(const Communicator& control, const CommandLine& line);

}  // namespace longspan::launcher
