// Checks the caller's memory for states (AttentionState).
#pragma once

#include <cstdint>

#include "longspan/serving.hpp"
#include "longspan/tensor.hpp"

namespace longspan {

/// The memory as a tensor of bytes.
Tensor bytes_of(const AttentionState& state, Device device);

/// Checks that it is large enough for the states of that many rows, and aligned.
void check_state(const AttentionState& state, std::int64_t tokens, std::int64_t heads,
                 std::int64_t value_dim);

}  // namespace longspan
