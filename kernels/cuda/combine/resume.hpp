// Handles rows that start from a state (AttendParams::resume) if their kernel cannot: the call's
// own states are written to scratch and then folded into those in the slot.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/dispatch/attend.hpp"
#include "kernels/params.hpp"

namespace longspan::kernels::cuda {

/// p.state = merge(p.state, aside) for the rows of the sequences that `lengths` selects; other rows
/// are not touched. A state in p.state that does not change is not written.
void fold_onto(const AttendParams& p, Lengths lengths, const StateSlots& aside,
               cudaStream_t stream);

}  // namespace longspan::kernels::cuda
