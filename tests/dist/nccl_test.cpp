// The verbs over NCCL, one GPU a rank: random bytes against what each rank computes itself, graphs,
// from_nccl, and what is refused.
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nccl.h>

#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "comm/transport.hpp"
#include "longspan/buffer.hpp"
#include "longspan/cuda.hpp"
#include "longspan/error.hpp"
#include "longspan/mpi.hpp"
#include "longspan/nccl.hpp"
#include "tests/dist/message.hpp"
#include "tests/dist/world.hpp"

namespace longspan::testing {
namespace {

using ::testing::HasSubstr;

Communicator gpu_world(std::chrono::milliseconds deadline = std::chrono::seconds(60)) {
  return from_mpi(MPI_COMM_WORLD, {.device = Device::cuda, .deadline = deadline});
}

/// A stream that does not wait for the default one.
struct OwnStream {
  cudaStream_t stream = nullptr;
  OwnStream() { EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess); }
  ~OwnStream() { cudaStreamDestroy(stream); }
};

Buffer on_gpu(const Bytes& bytes) {
  Buffer buffer(Device::cuda, bytes.size());
  buffer.upload(bytes.data());
  return buffer;
}

Buffer poisoned(std::size_t bytes) { return on_gpu(Bytes(bytes, 0xA5)); }

Bytes on_host(const Buffer& buffer, std::size_t bytes) {
  Bytes copy(bytes);
  EXPECT_EQ(cudaMemcpy(copy.data(), buffer.data(), bytes, cudaMemcpyDeviceToHost), cudaSuccess);
  return copy;
}

const std::vector<std::size_t> kSizes = {0, 1, 3, 16, 4095, 65537, (1 << 20) + 8};

void check_verbs(const Communicator& world) {
  const OwnStream own;
  const std::uint64_t seed = shared_seed(world);
  const int size = world.size(), rank = world.rank();
  for (std::size_t bytes : kSizes) {
    SCOPED_TRACE(bytes);
    Bytes gathered, send, exchanged;
    for (int p = 0; p < size; ++p) {
      append(gathered, message(seed, p, 0, bytes));
      append(send, message(seed, rank, p, bytes));
      append(exchanged, message(seed, p, rank, bytes));
    }
    const Buffer mine = on_gpu(message(seed, rank, 0, bytes)), all = on_gpu(send);
    Buffer got = poisoned(size * bytes);
    world.transport().all_gather(mine.data(), got.data(), bytes, on(own.stream), "all gather");
    world.transport().wait(on(own.stream), "all gather");
    EXPECT_TRUE(on_host(got, size * bytes) == gathered);

    got = poisoned(size * bytes);
    world.transport().all_to_all(all.data(), got.data(), bytes, on(own.stream), "all to all");
    world.transport().wait(on(own.stream), "all to all");
    EXPECT_TRUE(on_host(got, size * bytes) == exchanged);

    for (int distance = -size; distance <= size; ++distance) {
      got = poisoned(bytes);
      world.transport().shift(mine.data(), got.data(), bytes, distance, on(own.stream), "shift");
      world.transport().wait(on(own.stream), "shift");
      const int from = ((rank - distance) % size + size) % size;
      EXPECT_TRUE(on_host(got, bytes) == message(seed, from, 0, bytes)) << distance;
    }
  }
}

TEST(Nccl, EveryVerb) {
  const Communicator world = gpu_world();
  EXPECT_EQ(world.device(), Device::cuda);
  EXPECT_THAT(world.describe(), HasSubstr("NCCL"));
  check_verbs(world);
}

TEST(Nccl, EveryVerbOverTheCallersCommunicator) {
  int rank = 0, size = 0, device = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const Communicator first = gpu_world();  // takes this rank's GPU
  ASSERT_EQ(cudaGetDevice(&device), cudaSuccess);
  ncclUniqueId id{};
  if (rank == 0) {
    ASSERT_EQ(ncclGetUniqueId(&id), ncclSuccess);
  }
  MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
  ncclComm_t comm = nullptr;
  ASSERT_EQ(ncclCommInitRank(&comm, size, id, rank), ncclSuccess);
  {
    const Communicator world = from_nccl(comm);
    EXPECT_EQ(world.rank(), rank);
    EXPECT_EQ(world.size(), size);
    const auto texts =
        world.gather(std::string(static_cast<std::size_t>(rank) * 1000, 'x'), "test");
    for (int p = 0; p < size; ++p) EXPECT_EQ(texts[p].size(), static_cast<std::size_t>(p) * 1000);
    check_verbs(world);
  }
  EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);  // it stayed ours
}

TEST(Nccl, VerbsCanBeCapturedAndReplayed) {
  const Communicator world = gpu_world();
  const OwnStream own;
  const std::uint64_t seed = shared_seed(world);
  const int size = world.size();
  const std::size_t bytes = 10000;
  Buffer mine(Device::cuda, bytes), got(Device::cuda, bytes * size);

  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(own.stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  world.transport().all_gather(mine.data(), got.data(), bytes, on(own.stream), "captured");
  ASSERT_EQ(cudaStreamEndCapture(own.stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);

  for (int round = 0; round < 20; ++round) {
    const Bytes sent = message(seed + round, world.rank(), 0, bytes);
    ASSERT_EQ(cudaMemcpy(mine.data(), sent.data(), bytes, cudaMemcpyHostToDevice), cudaSuccess);
    ASSERT_EQ(cudaMemset(got.data(), 0xA5, bytes * size), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    ASSERT_EQ(cudaGraphLaunch(exec, own.stream), cudaSuccess);
    world.transport().wait(on(own.stream), "replay");
    Bytes expected;
    for (int p = 0; p < size; ++p) append(expected, message(seed + round, p, 0, bytes));
    ASSERT_TRUE(on_host(got, bytes * size) == expected) << round;
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
}

TEST(Nccl, ManyInARowWithoutWaiting) {
  const Communicator world = gpu_world();
  const OwnStream own;
  const int size = world.size(), rounds = 2000;  // more than the watchdog has slots
  std::vector<std::uint64_t> mine(rounds);
  for (int i = 0; i < rounds; ++i) mine[i] = 1000003u * i + world.rank();
  Buffer send(Device::cuda, rounds * 8), got(Device::cuda, std::size_t(rounds) * size * 8);
  send.upload(mine.data());
  for (int i = 0; i < rounds; ++i)
    world.transport().all_gather(static_cast<std::uint64_t*>(send.data()) + i,
                                 static_cast<std::uint64_t*>(got.data()) + i * size, 8,
                                 on(own.stream), "round");
  world.transport().wait(on(own.stream), "rounds");
  std::vector<std::uint64_t> all(std::size_t(rounds) * size);
  got.download(all.data());
  for (int i = 0; i < rounds; ++i)
    for (int p = 0; p < size; ++p) ASSERT_EQ(all[i * size + p], 1000003u * i + p);
}

/// A rank that stays away is named, the stream comes free, and every later call says the same.
TEST(Nccl, TheMissingRankIsNamedAndTheStreamComesFree) {
  const Communicator world = gpu_world(std::chrono::seconds(4));
  if (world.size() == 1) GTEST_SKIP() << "takes two ranks";
  const int absent = world.size() - 1;
  const OwnStream own;
  Buffer send(Device::cuda, 1 << 20), got(Device::cuda, world.size() << 20);
  if (world.rank() == absent) {
    std::this_thread::sleep_for(std::chrono::seconds(6));
    EXPECT_THROW(world.barrier("back again"), RankError);
    return;
  }
  std::string what;
  try {
    world.transport().all_gather(send.data(), got.data(), 1 << 20, on(own.stream), "states");
    world.transport().wait(on(own.stream), "states");
    ADD_FAILURE() << "no error";
  } catch (const RankError& error) {
    EXPECT_EQ(error.kind(), ErrorKind::timeout);
    EXPECT_EQ(error.rank(), absent);
    EXPECT_EQ(error.step(), "states");
    what = error.what();
  }
  EXPECT_EQ(cudaStreamSynchronize(own.stream), cudaSuccess);
  try {
    world.transport().all_gather(send.data(), got.data(), 1 << 20, on(own.stream), "later");
    ADD_FAILURE() << "went on";
  } catch (const RankError& error) {
    EXPECT_EQ(error.what(), what);
  }
}

/// Nobody waits: the watchdog alone frees the stream, and the next call says why.
TEST(Nccl, TheWatchdogFreesAStreamThatNobodyWaitsFor) {
  const Communicator world = gpu_world(std::chrono::seconds(4));
  if (world.size() == 1) GTEST_SKIP() << "takes two ranks";
  const int absent = world.size() - 1;
  const OwnStream own;
  Buffer send(Device::cuda, 1 << 20), got(Device::cuda, world.size() << 20);
  if (world.rank() == absent) {
    std::this_thread::sleep_for(std::chrono::seconds(6));
    EXPECT_THROW(world.barrier("back again"), RankError);
    return;
  }
  world.transport().all_gather(send.data(), got.data(), 1 << 20, on(own.stream), "states");
  EXPECT_EQ(cudaStreamSynchronize(own.stream), cudaSuccess);
  try {
    world.transport().wait(on(own.stream), "later");
    ADD_FAILURE() << "no error";
  } catch (const RankError& error) {
    EXPECT_EQ(error.rank(), absent);
    EXPECT_EQ(error.step(), "states");
  }
}

TEST(Nccl, ALongLetterArrivesThoughItsSenderLeaves) {
  for (int turn = 0; turn < 4; ++turn) {
    const Communicator world = gpu_world(std::chrono::seconds(20));
    const std::string mine(std::size_t{3} << 20, static_cast<char>('a' + world.rank()));
    const auto begin = std::chrono::steady_clock::now();
    const auto all = world.gather(mine, "long letters");
    for (int p = 0; p < world.size(); ++p)
      EXPECT_EQ(all[p], std::string(mine.size(), static_cast<char>('a' + p)));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(15));
  }
}

}  // namespace
}  // namespace longspan::testing
