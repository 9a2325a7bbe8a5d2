// The step after attention. A row's state is kept, or becomes a result, or is exchanged and merged
// with those of the other ranks. A backend does this in the attention kernel if it has one for
// both, and otherwise queues a second kernel.
#pragma once

#include <functional>
#include <variant>

#include "kernels/exchange.hpp"
#include "kernels/params.hpp"

namespace longspan::kernels {

/// The states stay in AttendParams::state.
struct StateEpilogue {};

/// MergeParams computes out and lse from the states that it names, including this call's. If it
/// names only this call's slot, and the keys are the last ones (the rank has all, or `resume` means
/// that the state covers the others), the slot may be written or not.
///
/// ExchangeParams computes them from all ranks' states. The rank's own slot may be written or not.
using Epilogue = std::variant<StateEpilogue, MergeParams, ExchangeParams>;

/// Called when attention is queued and the epilogue follows as a separate kernel. If it is given,
/// an exchange is always a separate kernel; the same data travels.
using EpilogueBegins = std::function<void()>;

/// Called by the calling thread between two work tiles of an attention on CPUs.
using BetweenTiles = std::function<void()>;

}  // namespace longspan::kernels
