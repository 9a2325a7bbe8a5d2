// Memory that other processes, or other ranks of this one, have mapped.
#pragma once

#include "kernels/simulated/runtime/memory.hpp"

namespace longspan::simulated {

/// Ends the process if memory that is about to be freed is still in use by a peer.
void check_unused(const Allocation& allocation);

}  // namespace longspan::simulated
