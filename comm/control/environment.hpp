// Tells who started this process. It is the one place that knows the launchers' variables.
#pragma once

#include <chrono>
#include <string>

#include "longspan/communicator.hpp"

namespace longspan::comm {

enum class Launcher { none, mpirun, torchrun, srun };

struct Launch {
  Launcher by = Launcher::none;
  int rank = 0;
  int size = 1;
  std::string address;  // where rank 0 listens, for torchrun and srun
  int port = 0;
};

/// Finds the launcher. Throws UsageError where the variables are not whole numbers or do not fit
/// together, and where some of those that tell a rank its place are set and others are not.
Launch find_launch();

/// See launched_rank of longspan/communicator.hpp.
std::string launched_rank();

/// The caller's deadline, or else the environment's.
std::chrono::milliseconds deadline_of(const CommOptions& options);

}  // namespace longspan::comm
