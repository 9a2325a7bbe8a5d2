// Lets ranks agree on their arguments, on the device, and on what went wrong.
#pragma once

#include <cstdio>
#include <functional>
#include <string>

#include "launcher/options/options.hpp"
#include "longspan/communicator.hpp"
#include "longspan/error.hpp"

namespace longspan::launcher {

/// An error that every rank has, in the same words: rank 0 prints it and all end in good order.
struct SharedError : Error {
  using Error::Error;
};

/// Does `work` on every rank. What goes wrong on one of them (a file that only it cannot read) is
/// thrown on all, with the rank's name. Errors of the communicator itself pass through. It is
/// collective.
void together(const Communicator& world, const std::string& step,
              const std::function<void()>& work);

/// Rank 0 writes `text` to `to`. Where that fails, as on a full disk, all ranks know. It is
/// collective.
void tell(const Communicator& world, const std::function<std::string()>& text,
          std::FILE* to = stdout);

/// Does `work` on rank 0 while the others wait for it; what goes wrong there is thrown on all. The
/// work calls pulse() so often that a deadline does not pass between two calls. It is collective.
using Pulse = std::function<void()>;
void on_first_rank(const Communicator& world, const std::string& step,
                   const std::function<void(const Pulse& pulse)>& work);

/// Gives the ranks before anything is known of them, on the host. A bad option must not cost the
/// start of NCCL.
Communicator control_world(const WorldOptions& options);

/// Gives the same ranks on the device that --backend asks for. It is collective.
Communicator world_for(const Communicator& control, const WorldOptions& options);

}  // namespace longspan::launcher
