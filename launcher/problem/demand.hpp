// Compares the memory of a run with the available memory, before any is allocated: a system that
// runs out of memory kills processes without a message. Sums are doubles, which no size overflows.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "launcher/problem/decode_inputs.hpp"
#include "launcher/problem/problem.hpp"

namespace longspan::launcher {

/// The bytes that one rank takes, by what they are for.
struct Demand {
  using Parts = std::vector<std::pair<std::string, double>>;
  Parts device;  // on a GPU; empty where the device is the host
  Parts host;
};

/// The bytes of all parts.
double total(const Demand::Parts& parts);

/// The demand of `longspan run`. The kernels' own tiles, some MiB for each thread, are not counted.
Demand demand_of(const Communicator& world, const Problem& problem, std::int64_t checked_rows);

/// The demand of one length of `longspan bench decode`.
Demand demand_of(const Communicator& world, const DecodeShape& shape);

/// Throws a SharedError (usage) with the figures where the ranks of a node take more than it has,
/// or one rank more than it may have. Collective.
void require_memory(const Communicator& world, const Demand& demand);

/// The same for the lists of a batch, which are made before anything else.
void require_memory_for_batch(std::int64_t sequences);

/// The bytes that processes of this node can allocate: the system's available memory, or the rest
/// of the limit of this process's control group, whichever is less. Infinite where neither is
/// known.
double available_memory();

}  // namespace longspan::launcher
