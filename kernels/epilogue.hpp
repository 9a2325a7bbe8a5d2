// What follows attention. A row's state stays as it is, or becomes a result, or goes to the other
// ranks and meets theirs. A backend does this in the kernel that attends, where it has one for
// both, and else queues a second kernel.
#pragma once

#include <functional>
#include <variant>

#include "kernels/exchange.hpp"
#include "kernels/params.hpp"

namespace longspan::kernels {

/// The states stay where AttendParams::state says.
struct StateEpilogue {};

/// MergeParams makes out and lse of the states that it names, this call's among them. Where it
/// names this call's slot alone, and the keys are the last ones (the rank has all, or `resume` says
/// that the state has those of the others), the slot may be written or not.
///
/// ExchangeParams makes them of all ranks' states. The rank's own slot may be written or not.
using Epilogue = std::variant<StateEpilogue, MergeParams, ExchangeParams>;

/// Is called when attention is queued and the epilogue follows as a kernel of its own. Where it is
/// given, an exchange always is such a kernel; what travels is the same.
using EpilogueBegins = std::function<void()>;

/// What the calling thread does between two work tiles of an attention on processors.
using BetweenTiles = std::function<void()>;

}  // namespace longspan::kernels
