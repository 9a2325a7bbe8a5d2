// Ranks that agree: on their arguments, on the device, and on what went wrong.
#pragma once

#include <functional>
#include <string>

#include "launcher/options.hpp"
#include "longspan/communicator.hpp"
#include "longspan/error.hpp"

namespace longspan::launcher {

/// An error that every rank has, in the same words: rank 0 prints it and all end in good order.
struct SharedError : Error {
  using Error::Error;
};

/// Does `work` on every rank. What goes wrong on one of them (a file that only it cannot read) is
/// thrown on all, naming the rank. Errors of the communicator itself pass through. Collective.
void together(const Communicator& world, const std::string& step,
              const std::function<void()>& work);

/// Rank 0 does `work` while the others wait for it, and what goes wrong there is thrown on all. The
/// work calls pulse() so often that a deadline does not pass between two calls. Collective.
using Pulse = std::function<void()>;
void on_first_rank(const Communicator& world, const std::string& step,
                   const std::function<void(const Pulse& pulse)>& work);

/// The ranks before anything is known of them: on the host. A bad option must not cost the start of
/// NCCL.
Communicator control_world(const WorldOptions& options);

/// The same ranks on the device that --backend asks for. Collective.
Communicator world_for(const Communicator& control, const WorldOptions& options);

}  // namespace longspan::launcher
