// Rows that begin from a state (AttendParams::resume) where their kernel cannot: the call's own
// states are written aside and then folded onto those that stand in the slot.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/dispatch/attend.hpp"
#include "kernels/params.hpp"

namespace longspan::kernels::cuda {

/// The slots aside, a slot for each that the call writes, in memory of `data`.
inline StateSlots states_aside(const AttendParams& p, std::byte* data) {
  return {data, p.tokens * p.heads, p.value_dim, p.parts ? p.parts.count : 1};
}

/// p.state = merge(p.state, aside) for the rows of the sequences that `lengths` serves; other rows
/// are not touched. States that stand in p.state and gain nothing are not written.
void fold_onto(const AttendParams& p, Lengths lengths, const StateSlots& aside,
               cudaStream_t stream);

}  // namespace longspan::kernels::cuda
