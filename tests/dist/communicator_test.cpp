// Communicators over MPI.
#include "tests/communicator_tests.hpp"

#include "longspan/mpi.hpp"
#include "tests/dist/world.hpp"

namespace longspan::testing {

Communicator make_world(CommOptions options) { return from_mpi(MPI_COMM_WORLD, options); }
void meet() { MPI_Barrier(MPI_COMM_WORLD); }

namespace {

TEST(FromMpi, WorksOnAPartOfTheWorld) {
  int rank = 0, size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  MPI_Comm part;
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2, -rank, &part);
  {
    const Communicator world = from_mpi(part);
    const auto texts = world.gather(std::to_string(rank), "part");
    for (std::size_t i = 0; i < texts.size(); ++i) {
      EXPECT_EQ(std::stoi(texts[i]) % 2, rank % 2);
      if (i > 0) {
        EXPECT_LT(std::stoi(texts[i]), std::stoi(texts[i - 1]));
      }
    }
  }
  MPI_Comm_free(&part);
}

TEST(FromEnvironment, FindsTheRanksOfMpirun) {
  const Communicator world = from_environment();
  int rank = 0, size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  EXPECT_EQ(world.rank(), rank);
  EXPECT_EQ(world.size(), size);
  EXPECT_THAT(world.describe(), HasSubstr("1 node"));
}

}  // namespace
}  // namespace longspan::testing
