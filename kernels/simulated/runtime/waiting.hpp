// Waits of the host: it runs the GPUs until its condition holds. Other threads get a turn between
// the slices.
#pragma once

#include <functional>

#include "kernels/simulated/runtime/calls.hpp"

namespace longspan::simulated {

/// Waits until until() is true. If nothing can move, nor can another rank change that, the machine
/// reports the standstill.
void wait(Lock& lock, const std::function<bool()>& until);

/// The same for conditions that do not depend only on this process's GPUs: other ranks have to
/// arrive.
void wait_for_others(Lock& lock, const std::function<bool()>& until);

/// The progress during a query: a little, even if its condition already holds.
void go_on_a_little(const std::function<bool()>& until);

/// Other processes take part from now on. Clocks must agree, and the GPUs must also run while the
/// host does other work, as real ones do: a thread does this.
void meet_other_processes();

}  // namespace longspan::simulated
