// Judges gradients. dq of a sampled row is compared with the float64 gradient of the whole
// computation. A sampled key's gradients are sums over all rows: float64 starts from the run's own
// out and lse there, as backward does, since those are judged by themselves. Gradients of sinks
// likewise. An element is right up to the larger of
//
//     1.5 * the largest error of plain fp32, which starts from the run's out and lse and rounds
//     each gradient once, on the elements that are compared, and 2 units in the last place of the
//     largest, of the type to which the kernels round weights
//
//     what rounding in fp32 may do to this element (gradient_rounding.hpp)
//
// The bounds are the same for every number of ranks.
#pragma once

#include "launcher/judge/judge.hpp"

namespace longspan::launcher {

/// Adds the errors of the gradients to a judgement. `answer` is what this rank has, `judged` the
/// gathered rows and keys that are compared. Collective.
void judge_gradients(const Communicator& world, const Problem& problem, const Answer& answer,
                     const Answer& judged, Judgement& judgement);

}  // namespace longspan::launcher
