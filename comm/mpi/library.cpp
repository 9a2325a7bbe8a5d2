// The entry of longspan::mpi in the table of libraries.
#include <mpi.h>

#include <string>

#include "comm/libraries.hpp"
#include "comm/mpi/from_mpi.hpp"
#include "comm/mpi/registration.hpp"
#include "comm/mpi/session.hpp"

namespace longspan::comm {
namespace {

/// A text such as "Open MPI v4.1.4", for the library that runs.
std::string version() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0;
  MPI_Get_library_version(text, &length);
  const std::string all(text, static_cast<std::size_t>(length));
  return all.substr(0, all.find_first_of(",\n"));
}

constexpr MpiLibrary kLibrary{.from_mpirun = from_mpirun, .version = version};

}  // namespace

bool register_mpi() {
  register_library(kLibrary);
  static const bool remembers = (remember_forks(), true);  // once, however many objects call this
  return remembers;
}

}  // namespace longspan::comm
