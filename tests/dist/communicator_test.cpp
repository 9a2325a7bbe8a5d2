// Every verb on every rank count, with random bytes: each rank computes from (seed, sender,
// receiver) what it must get, so nothing is taken from the code under test but the seed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "comm/transport.hpp"
#include "longspan/communicator.hpp"
#include "longspan/error.hpp"
#include "longspan/mpi.hpp"
#include "tests/dist/message.hpp"
#include "tests/dist/world.hpp"

namespace longspan::testing {
namespace {

using ::testing::HasSubstr;

Communicator host_world() { return from_mpi(MPI_COMM_WORLD); }

Bytes poison(std::size_t bytes) { return Bytes(bytes, 0xA5); }

const std::vector<std::size_t> kSizes = {0, 1, 3, 16, 4095, 4096, 65537, 1 << 20};

TEST(Verbs, AllGather) {
  const Communicator world = host_world();
  const std::uint64_t seed = shared_seed(world);
  for (std::size_t bytes : kSizes) {
    SCOPED_TRACE(bytes);
    Bytes expected;
    for (int p = 0; p < world.size(); ++p) append(expected, message(seed, p, 0, bytes));
    const Bytes mine = message(seed, world.rank(), 0, bytes);
    Bytes got = poison(expected.size());
    world.transport().all_gather(mine.data(), got.data(), bytes, {}, "test");
    EXPECT_TRUE(got == expected);

    Bytes in_place = poison(expected.size());
    if (bytes) std::memcpy(in_place.data() + world.rank() * bytes, mine.data(), bytes);
    world.transport().all_gather(in_place.data() + world.rank() * bytes, in_place.data(), bytes, {},
                                 "test in place");
    EXPECT_TRUE(in_place == expected);
  }
}

TEST(Verbs, AllToAll) {
  const Communicator world = host_world();
  const std::uint64_t seed = shared_seed(world);
  for (std::size_t bytes : kSizes) {
    SCOPED_TRACE(bytes);
    Bytes send, expected;
    for (int p = 0; p < world.size(); ++p) {
      append(send, message(seed, world.rank(), p, bytes));
      append(expected, message(seed, p, world.rank(), bytes));
    }
    Bytes got = poison(expected.size());
    world.transport().all_to_all(send.data(), got.data(), bytes, {}, "test");
    EXPECT_TRUE(got == expected);
  }
}

TEST(Verbs, ShiftByEveryDistance) {
  const Communicator world = host_world();
  const std::uint64_t seed = shared_seed(world);
  const int size = world.size();
  for (int distance = -size - 1; distance <= size + 1; ++distance) {
    SCOPED_TRACE(distance);
    for (std::size_t bytes : kSizes) {
      const int from = ((world.rank() - distance) % size + size) % size;
      const Bytes mine = message(seed, world.rank(), distance + 100, bytes);
      Bytes got = poison(bytes);
      world.transport().shift(mine.data(), got.data(), bytes, distance, {}, "test");
      EXPECT_TRUE(got == message(seed, from, distance + 100, bytes));
    }
  }
}

TEST(Verbs, ManyInARowKeepTheirOrder) {
  const Communicator world = host_world();
  const std::uint64_t seed = shared_seed(world);
  for (int round = 0; round < 300; ++round) {
    const std::uint64_t mine = seed * 1000003u + round * 101 + world.rank();
    std::vector<std::uint64_t> got(world.size());
    world.transport().all_gather(&mine, got.data(), sizeof mine, {}, "round");
    for (int p = 0; p < world.size(); ++p) ASSERT_EQ(got[p], seed * 1000003u + round * 101 + p);
  }
  world.transport().wait({}, "end");
}

TEST(Gather, InRankOrderWithAnyBytesAndLengths) {
  const Communicator world = host_world();
  for (int round = 0; round < 20; ++round) {
    const auto text_of = [&](int p) {
      return std::string(static_cast<std::size_t>(p) * 5000, '\0') + "rank:" + std::to_string(p) +
             "\n" + std::to_string(round);
    };
    const auto texts = world.gather(text_of(world.rank()), "gather");
    ASSERT_EQ(texts.size(), static_cast<std::size_t>(world.size()));
    for (int p = 0; p < world.size(); ++p) EXPECT_EQ(texts[p], text_of(p));
  }
  world.barrier("end");
}

TEST(Agree, PassesWhereAllAreEqual) {
  const Communicator world = host_world();
  agree(world, {{"heads", "32"}, {"dim", "128"}}, "make the layer");
}

TEST(Agree, NamesTheArgumentAndBothValuesOnEveryRank) {
  const Communicator world = host_world();
  for (int odd = 1; odd < world.size(); ++odd) {
    const bool me = world.rank() == odd;
    try {
      agree(world, {{"heads", "32"}, {"dim", me ? "64" : "128"}}, "make the layer");
      ADD_FAILURE() << "no error";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), HasSubstr("'dim'"));
      EXPECT_THAT(error.what(), HasSubstr("rank 0 has 128"));
      EXPECT_THAT(error.what(), HasSubstr("rank " + std::to_string(odd) + " has 64"));
    }
    agree(world, {{"heads", "32"}}, "again");  // the communicator lives on
  }
}

/// Runs `work` and expects it to fail; then that every later call fails alike.
RankError failure_of(const Communicator& world, const std::function<void()>& work) {
  try {
    work();
  } catch (const RankError& error) {
    for (int again = 0; again < 2; ++again) {
      try {
        world.barrier("after the failure");
        ADD_FAILURE() << "a failed communicator went on";
      } catch (const RankError& same) {
        EXPECT_STREQ(same.what(), error.what());
        EXPECT_EQ(same.rank(), error.rank());
      }
    }
    return error;
  }
  ADD_FAILURE() << "no error";
  return RankError(ErrorKind::internal, -2, "", "");
}

TEST(Abort, EndsTheOthersEarlyWithTheReason) {
  const Communicator world = from_mpi(MPI_COMM_WORLD, {.deadline = std::chrono::seconds(90)});
  if (world.size() == 1) GTEST_SKIP() << "takes two ranks";
  const int quitter = world.size() - 1;
  std::vector<int> got(world.size());
  if (world.rank() == quitter) world.abort("q.npy is truncated");
  const RankError error = failure_of(world, [&] {
    world.transport().all_gather(&got[world.rank()], got.data(), sizeof(int), {}, "states");
  });
  EXPECT_EQ(error.kind(), ErrorKind::rank_failure);
  EXPECT_EQ(error.rank(), quitter);
  EXPECT_THAT(error.what(), HasSubstr("q.npy is truncated"));
}

TEST(Abort, EndsAGatherToo) {
  const Communicator world = from_mpi(MPI_COMM_WORLD, {.deadline = std::chrono::seconds(90)});
  if (world.size() == 1) GTEST_SKIP() << "takes two ranks";
  if (world.rank() == 0) world.abort("no memory");
  const RankError error = failure_of(world, [&] { world.barrier("meet"); });
  EXPECT_EQ(error.rank(), 0);
}

TEST(Disagreement, DifferentSizesAreNamed) {
  const Communicator world = from_mpi(MPI_COMM_WORLD, {.deadline = std::chrono::seconds(90)});
  if (world.size() == 1) GTEST_SKIP() << "takes two ranks";
  const std::size_t bytes = world.rank() == 1 ? 12 : 16;
  Bytes send(16), got(16 * world.size());
  const RankError error = failure_of(
      world, [&] { world.transport().all_gather(send.data(), got.data(), bytes, {}, "states"); });
  EXPECT_EQ(error.kind(), ErrorKind::rank_failure);
  EXPECT_EQ(error.step(), "states");
}

TEST(Disagreement, DifferentStepsOfAGatherAreNamed) {
  const Communicator world = from_mpi(MPI_COMM_WORLD, {.deadline = std::chrono::seconds(90)});
  if (world.size() == 1) GTEST_SKIP() << "takes two ranks";
  const RankError error =
      failure_of(world, [&] { world.barrier(world.rank() == 1 ? "left" : "right"); });
  EXPECT_THAT(error.what(), HasSubstr("'left'"));
  EXPECT_THAT(error.what(), HasSubstr("'right'"));
}

TEST(Deadline, ARankThatWaitsElsewhereIsNamed) {
  const Communicator world = from_mpi(MPI_COMM_WORLD, {.deadline = std::chrono::seconds(2)});
  if (world.size() == 1) GTEST_SKIP() << "takes two ranks";
  const int odd = world.size() - 1;
  std::vector<int> got(world.size());
  const RankError error = failure_of(world, [&] {
    if (world.rank() == odd)
      world.barrier("elsewhere");
    else
      world.transport().all_gather(&got[world.rank()], got.data(), sizeof(int), {}, "states");
  });
  EXPECT_EQ(error.kind(), ErrorKind::rank_failure);
  EXPECT_EQ(error.rank(), odd);
  EXPECT_THAT(error.what(), HasSubstr("'elsewhere'"));
}

/// The absent rank does something else for longer than the deadline; it hears the verdict when it
/// comes back.
void stay_away(const Communicator& world, int me) {
  std::this_thread::sleep_for(world.deadline() + std::chrono::seconds(1));
  const RankError error = failure_of(world, [&] { world.barrier("back again"); });
  EXPECT_EQ(error.rank(), me);
}

TEST(Deadline, ARankThatDoesNotComeIsNamed) {
  const Communicator world = from_mpi(MPI_COMM_WORLD, {.deadline = std::chrono::seconds(2)});
  if (world.size() == 1) GTEST_SKIP() << "takes two ranks";
  const int absent = world.size() / 2;
  if (world.rank() == absent) return stay_away(world, absent);
  std::vector<int> got(world.size());
  const RankError error = failure_of(world, [&] {
    world.transport().all_gather(&got[world.rank()], got.data(), sizeof(int), {}, "states");
  });
  EXPECT_EQ(error.kind(), ErrorKind::timeout);
  EXPECT_EQ(error.rank(), absent);
  EXPECT_EQ(error.step(), "states");
  EXPECT_THAT(error.what(), HasSubstr("'states'"));
}

TEST(Deadline, TheStuckRankIsNamedThroughARing) {
  const Communicator world = from_mpi(MPI_COMM_WORLD, {.deadline = std::chrono::seconds(2)});
  if (world.size() == 1) GTEST_SKIP() << "takes two ranks";
  if (world.rank() == 0) return stay_away(world, 0);
  Bytes send(1 << 20), got(1 << 20);
  const RankError error = failure_of(world, [&] {
    for (int turn = 0; turn < world.size(); ++turn)
      world.transport().shift(send.data(), got.data(), send.size(), 1, {}, "ring");
  });
  EXPECT_EQ(error.kind(), ErrorKind::timeout);
  EXPECT_EQ(error.rank(), 0);
}

TEST(Deadline, ARankThatLeavesEarlyIsNamed) {
  const Communicator world = from_mpi(MPI_COMM_WORLD, {.deadline = std::chrono::seconds(90)});
  if (world.size() == 1) GTEST_SKIP() << "takes two ranks";
  if (world.rank() == 1) return;
  const RankError error = failure_of(world, [&] { world.barrier("meet"); });
  EXPECT_EQ(error.kind(), ErrorKind::rank_failure);
  EXPECT_EQ(error.rank(), 1);
  EXPECT_THAT(error.what(), HasSubstr("left"));
}

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
