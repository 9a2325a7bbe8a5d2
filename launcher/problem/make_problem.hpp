// Makes the problem that the options of a run describe: from files, or from a seed.
#pragma once

#include "launcher/options/options.hpp"
#include "launcher/problem/problem.hpp"

namespace longspan::launcher {

/// Throws InputError for files that do not fit each other, and for sizes that are not supported.
Problem make_problem(const RunOptions& options, const WorldOptions& world);

}  // namespace longspan::launcher
