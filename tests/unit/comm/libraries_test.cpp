// Programs that link only longspan::longspan, as this one does: their error when they meet a
// launcher's ranks.
#include "comm/libraries.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <string>

#include "comm/control/control.hpp"
#include "comm/gpu.hpp"
#include "longspan/communicator.hpp"
#include "longspan/error.hpp"
#include "longspan/info.hpp"

namespace longspan {
namespace {

using ::testing::HasSubstr;

/// Sets a variable for the time of a test.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~Variable() { unsetenv(name_); }

 private:
  const char* name_;
};

std::string row(const std::string& name) {
  for (const auto& [row, value] : system_info())
    if (row == name) return value;
  return "";
}

TEST(Libraries, NeitherIsLinkedUnlessAskedFor) {
  EXPECT_EQ(comm::mpi_library(), nullptr);
  EXPECT_EQ(comm::nccl_library(), nullptr);
#if defined(LONGSPAN_TEST_MPI_IS_BUILT)
  EXPECT_EQ(row("MPI"), "not linked: link longspan::mpi");
#else
  EXPECT_THAT(row("MPI"), HasSubstr("-DLONGSPAN_MPI=ON"));
#endif
#if defined(LONGSPAN_HAVE_CUDA)
  EXPECT_EQ(row("NCCL"), "not linked: link longspan::nccl");
#endif
}

TEST(Libraries, RanksOfMpirunAreToldWhatToLink) {
  const Variable ranks("OMPI_COMM_WORLD_SIZE", "2"), rank("OMPI_COMM_WORLD_RANK", "0");
  try {
    from_environment();
    ADD_FAILURE() << "went on";
  } catch (const Unsupported& error) {
#if defined(LONGSPAN_TEST_MPI_IS_BUILT)
    EXPECT_THAT(error.what(), HasSubstr("link longspan::mpi"));
#else
    EXPECT_THAT(error.what(), HasSubstr("-DLONGSPAN_MPI=ON"));
#endif
  }
}

TEST(Libraries, OneRankOfMpirunNeedsNoMpi) {
  const Variable ranks("OMPI_COMM_WORLD_SIZE", "1");
  EXPECT_EQ(from_environment().size(), 1);
}

TEST(Libraries, GpusOfSeveralRanksNeedNccl) {
  try {
    comm::gpu_transport(comm::self_control(std::chrono::seconds(1)), -1);
    ADD_FAILURE() << "went on";
  } catch (const Unsupported& error) {
#if defined(LONGSPAN_HAVE_CUDA)
    EXPECT_THAT(error.what(), HasSubstr("link longspan::nccl"));
#else
    EXPECT_THAT(error.what(), HasSubstr("-DLONGSPAN_CUDA=ON"));
#endif
  }
}

/// The last one, since it stays registered.
TEST(Libraries, WhatIsRegisteredIsFound) {
  static int asked = 0;
  static constexpr comm::MpiLibrary kLibrary{.from_mpirun =
                                                 [](const CommOptions&, int size) {
                                                   asked = size;
                                                   return self();
                                                 },
                                             .version = [] { return std::string("a test's MPI"); }};
  comm::register_library(kLibrary);
  const Variable ranks("OMPI_COMM_WORLD_SIZE", "3"), rank("OMPI_COMM_WORLD_RANK", "0");
  from_environment();
  EXPECT_EQ(asked, 3);
  EXPECT_EQ(row("MPI"), "a test's MPI");
}

}  // namespace
}  // namespace longspan
