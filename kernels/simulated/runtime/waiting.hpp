// How the host waits: it lets the GPUs go on until what it waits for is so. Other threads get in
// between the slices.
#pragma once

#include <functional>

#include "kernels/simulated/runtime/calls.hpp"

namespace longspan::simulated {

/// Until until() is true. Where nothing can go on, nor can another rank change that, the machine
/// reports the standstill.
void wait(Lock& lock, const std::function<bool()>& until);

/// The same for what does not depend on this process's GPUs alone: other ranks have to come.
void wait_for_others(Lock& lock, const std::function<bool()>& until);

/// What a query lets happen: a little, also where what it asks about is so already.
void go_on_a_little(const std::function<bool()>& until);

/// Other processes take part from now on. Clocks have to agree, and the GPUs go on also while the
/// host is elsewhere, as real ones do: a thread sees to it.
void meet_other_processes();

}  // namespace longspan::simulated
