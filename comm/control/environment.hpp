// Finds the launcher of this process. Only this file knows the launchers' variables.
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

/// Finds the launcher. Throws UsageError where variables are not whole numbers or contradict each
/// other, and where only some of those that give a rank its place are set.
Launch find_launch();

/// See launched_rank of longspan/communicator.hpp.
std::string launched_rank();

/// The caller's deadline, or else the environment's.
std::chrono::milliseconds deadline_of(const CommOptions& options);

}  // namespace longspan::comm
