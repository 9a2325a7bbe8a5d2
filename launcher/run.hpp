// `longspan run`: one problem, computed, timed, checked and written.
#pragma once

#include "launcher/options.hpp"
#include "longspan/communicator.hpp"

namespace longspan::launcher {

/// Returns the exit status. Collective.
int run(const Communicator& control, const CommandLine& line);

}  // namespace longspan::launcher
