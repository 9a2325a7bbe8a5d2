// The ranks of a test under mpirun: a separate communicator for each test, so that one that fails
// does not affect the next. LONGSPAN_TEST_DEVICE=cuda runs the same tests on GPUs.
#pragma once

#include <mpi.h>

#include <cstdlib>
#include <string>

#include "longspan/communicator.hpp"
#include "longspan/mpi.hpp"

namespace longspan::tests {

inline bool wants_gpus() {
  const char* name = std::getenv("LONGSPAN_TEST_DEVICE");
  return name && std::string(name) == "cuda";
}

inline Communicator test_world() {
  const Communicator world =
      from_mpi(MPI_COMM_WORLD, {.device = wants_gpus() ? Device::cuda : Device::host});
  world.make_current();  // for what the tests allocate
  return world;
}

}  // namespace longspan::tests
