// Lets ranks agree on their arguments, on the device, and on what went wrong.
#pragma once

#include <cstdio>
#include <functional>
#include <string>

#include "launcher/options/options.hpp"
#include "longspan/communicator.hpp"
#include "longspan/error.hpp"

namespace longspan::launcher {

/// An error that every rank has, with the same text: rank 0 prints it, and all end in the orderly
/// way.
struct SharedError : Error {
  using Error::Error;
};

/// Does `work` on every rank. An error on one of them (a file that only it cannot read) is thrown
/// on all, with the rank's name. Errors of the communicator itself pass through. Collective.
void together(const Communicator& world, const std::string& step,
              const std::function<void()>& work);

/// Rank 0 writes `text` to `to`. Where that fails, as on a full disk, all ranks know. Collective.
void tell(const Communicator& world, const std::function<std::string()>& text,
          std::FILE* to = stdout);

/// Does `work` on rank 0 while the others wait; its errors are thrown on all. The work calls
/// pulse() often enough that a deadline does not pass between two calls. Collective.
using Pulse = std::function<void()>;
void on_first_rank(const Communicator& world, const std::string& step,
                   const std::function<void(const Pulse& pulse)>& work);

/// The ranks before anything is known of them, on the host: a bad option must not cost the start of
/// NCCL.
Communicator control_world(const WorldOptions& options);

/// The same ranks on the device of --backend. Collective.
Communicator world_for(const Communicator& control, const WorldOptions& options);

}  // namespace longspan::launcher
