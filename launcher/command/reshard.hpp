// Runs `longspan reshard`: moves a cache made from a seed from one layout to another, times the
// move, and compares every byte of the new cache with the expected one.
#pragma once

#include "launcher/options/options.hpp"
#include "longspan/communicator.hpp"

namespace longspan::launcher {

/// Prints the report on rank 0 and returns the exit status. Collective; throws a SharedError
/// (wrong_result) where a byte is wrong.
int reshard(const Communicator& control, const CommandLine& line);

}  // namespace longspan::launcher
