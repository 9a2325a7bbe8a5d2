// Runs `longspan reshard`: a cache made from a seed moves from one layout to another, is timed, and
// every byte of the new one is compared with what it has to be.
#pragma once

#include "launcher/options/options.hpp"
#include "longspan/communicator.hpp"

namespace longspan::launcher {

/// Prints the report on rank 0 and returns the exit status. It is collective, and throws a
/// SharedError (wrong_result) where a byte is not what it has to be.
int reshard(const Communicator& control, const CommandLine& line);

}  // namespace longspan::launcher
