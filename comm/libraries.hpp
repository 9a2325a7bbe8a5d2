// The libraries that a program may link beside longspan::longspan: longspan::mpi and
// longspan::nccl. Each registers itself here before main begins, by an object file that its CMake
// target puts into every program that links it (comm/mpi/registration.cpp). So from_environment
// finds MPI although neither the program nor this library names anything of it.
#pragma once

#include <memory>
#include <string>

#include "comm/control/control.hpp"
#include "comm/transport.hpp"
#include "longspan/communicator.hpp"

namespace longspan::comm {

struct MpiLibrary {
  /// The ranks of mpirun, where MPI may not be initialised yet. `size` is the number of ranks that
  /// the launcher announces, or 0 where it is unknown.
  Communicator (*from_mpirun)(const CommOptions& options, int size);
  std::string (*version)();
};

struct NcclLibrary {
  /// The same as gpu_transport.
  std::shared_ptr<Transport> (*connect)(std::shared_ptr<Control> control, int gpu);
  std::string (*version)();
};

/// The libraries; null where the program does not link them.
const MpiLibrary* mpi_library();
const NcclLibrary* nccl_library();

/// Registers a library, which has static storage, before main, on the thread that loads the program
/// or the library. A second call with the same argument does nothing: the object file may be in the
/// program and also in a shared library of it.
void register_library(const MpiLibrary& library);
void register_library(const NcclLibrary& library);

}  // namespace longspan::comm
