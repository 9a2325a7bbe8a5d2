// The collectives over NCCL, one GPU a rank: random bytes against each rank's own computation,
// graphs, from_nccl, and what is refused.
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nccl.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "comm/transport.hpp"
#include "longspan/buffer.hpp"
#include "longspan/cuda.hpp"
#include "longspan/element.hpp"
#include "longspan/error.hpp"
#include "longspan/mpi.hpp"
#include "longspan/nccl.hpp"
#include "tests/dist/world.hpp"
#include "tests/support/message.hpp"
#include "tests/support/random_elements.hpp"

namespace longspan::tests {
namespace {

using ::testing::HasSubstr;

Communicator gpu_world(std::chrono::milliseconds deadline = std::chrono::seconds(60)) {
  const Communicator world =
      from_mpi(MPI_COMM_WORLD, {.device = Device::cuda, .deadline = deadline});
  world.make_current();
  return world;
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

void check_collectives(const Communicator& world) {
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
    comm::transport_of(world).all_gather(mine.data(), got.data(), bytes, as_stream(own.stream),
                                         "all gather");
    comm::transport_of(world).wait(as_stream(own.stream), "all gather");
    EXPECT_TRUE(on_host(got, size * bytes) == gathered);

    got = poisoned(size * bytes);
    comm::transport_of(world).all_to_all(all.data(), got.data(), bytes, as_stream(own.stream),
                                         "all to all");
    comm::transport_of(world).wait(as_stream(own.stream), "all to all");
    EXPECT_TRUE(on_host(got, size * bytes) == exchanged);

    for (int distance = -size; distance <= size; ++distance) {
      got = poisoned(bytes);
      comm::transport_of(world).shift(mine.data(), got.data(), bytes, distance,
                                      as_stream(own.stream), "shift");
      comm::transport_of(world).wait(as_stream(own.stream), "shift");
      const int from = ((rank - distance) % size + size) % size;
      EXPECT_TRUE(on_host(got, bytes) == message(seed, from, 0, bytes)) << distance;
    }
  }
}

/// Values of order 1, the same on every rank that computes them.
Bytes values_of(std::uint64_t seed, int rank, std::size_t count, DType dtype) {
  Bytes bytes(count * size_of(dtype));
  normal_values(seed, static_cast<std::uint32_t>(rank))
      .store(bytes.data(), dtype, 0, static_cast<std::int64_t>(count));
  return bytes;
}

/// Against the sum in float64. NCCL rounds at every step, in its own order, and repeats it.
void check_sums(const Communicator& world) {
  const OwnStream own;
  const std::uint64_t seed = shared_seed(world);
  const int size = world.size(), rank = world.rank();
  for (const DType dtype : {fp32, fp16, bf16})
    for (const std::size_t count : {0, 1, 3, 1001, 100003}) {
      SCOPED_TRACE(std::string(name(dtype)) + " " + std::to_string(count));
      std::vector<Bytes> sent;
      for (int p = 0; p < size; ++p) sent.push_back(values_of(seed, p, count * size, dtype));
      const Buffer send = on_gpu(sent[rank]);
      const std::size_t bytes = count * size_of(dtype);
      Bytes first;
      for (int turn = 0; turn < 3; ++turn) {
        const Buffer got = poisoned(bytes);
        comm::transport_of(world).reduce_scatter(send.data(), got.data(), count, dtype,
                                                 as_stream(own.stream), "sum");
        comm::transport_of(world).wait(as_stream(own.stream), "sum");
        if (turn == 0) first = on_host(got, bytes);
        EXPECT_TRUE(on_host(got, bytes) == first) << turn;
      }
      const double unit = std::ldexp(1.0, dtype == fp32 ? -24 : dtype == fp16 ? -11 : -8);
      for (std::size_t i = 0; i < count; ++i) {
        const auto at = static_cast<std::int64_t>(rank * count + i);
        double exact = 0, largest = 0;
        for (int p = 0; p < size; ++p) {
          const double one = load_element(sent[p].data(), dtype, at);
          exact += one;
          largest += std::abs(one);
        }
        const double found = load_element(first.data(), dtype, static_cast<std::int64_t>(i));
        ASSERT_LE(std::abs(found - exact), size * unit * largest + 1e-6) << i;
      }
    }
}

TEST(Nccl, SumsAreNearAndRepeatTheirBits) { check_sums(gpu_world()); }

/// The caller's work could be a kernel; a long copy serves too.
void compute_on(cudaStream_t stream, Buffer& scratch) {
  for (int i = 0; i < 4; ++i)
    ASSERT_EQ(cudaMemsetAsync(scratch.data(), i, scratch.bytes(), stream), cudaSuccess);
}

/// A transfer follows its stream, and a waiting stream follows the transfer, though waits come on
/// streams in another order. Data to send are written on one stream right before the start, and
/// received data are copied on another one right after the wait.
void start_and_wait(const Communicator& world, std::uint64_t seed, cudaStream_t stream,
                    cudaStream_t other, const std::vector<Buffer>& filled,
                    std::vector<Buffer>& send, std::vector<Buffer>& got, std::vector<Buffer>& seen,
                    Buffer& scratch) {
  const int size = world.size();
  const std::size_t bytes = seen[1].bytes();
  comm::Transport& transport = comm::transport_of(world);
  std::vector<comm::Transfer> open;
  for (std::size_t i = 0; i < send.size(); ++i)
    ASSERT_EQ(cudaMemcpyAsync(send[i].data(), filled[i].data(), send[i].bytes(),
                              cudaMemcpyDeviceToDevice, stream),
              cudaSuccess);
  open.push_back(transport.start_all_gather(send[0].data(), got[0].data(), bytes, as_stream(stream),
                                            "gather"));
  open.push_back(
      transport.start_shift(send[1].data(), got[1].data(), bytes, 1, as_stream(stream), "ring"));
  open.push_back(transport.start_all_to_all(send[2].data(), got[2].data(), bytes / size / 4 * 4,
                                            as_stream(stream), "all to all"));
  open.push_back(transport.start_reduce_scatter(send[3].data(), got[3].data(), bytes / 4, fp32,
                                                as_stream(stream), "sum"));
  compute_on(stream, scratch);
  std::mt19937 random(static_cast<unsigned>(seed));
  std::vector<std::size_t> order(open.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), random);
  for (const std::size_t i : order) {
    const cudaStream_t waits = i % 2 ? stream : other;
    open[i].wait(as_stream(waits));
    ASSERT_EQ(cudaMemcpyAsync(seen[i].data(), got[i].data(), seen[i].bytes(),
                              cudaMemcpyDeviceToDevice, waits),
              cudaSuccess);
  }
}

/// Directly, and captured in a graph that forks to `other` and to the transport's own stream.
TEST(Nccl, StartedTransfersFollowTheirStreamAndAreFollowed) {
  const Communicator world = gpu_world();
  const int size = world.size(), rank = world.rank();
  const std::size_t bytes = 60000;
  const std::uint64_t seed = shared_seed(world);
  const OwnStream own, beside;
  cudaEvent_t fork = nullptr, join = nullptr;
  ASSERT_EQ(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming), cudaSuccess);
  ASSERT_EQ(cudaEventCreateWithFlags(&join, cudaEventDisableTiming), cudaSuccess);
  std::vector<Buffer> filled, send, got, seen;
  for (const std::size_t count : {bytes, bytes, bytes, bytes * size}) {
    filled.emplace_back(Device::cuda, count);
    send.emplace_back(Device::cuda, count);
  }
  for (const std::size_t count : {bytes * size, bytes, bytes / size / 4 * 4 * size, bytes}) {
    got.emplace_back(Device::cuda, count);
    seen.emplace_back(Device::cuda, count);
  }
  Buffer scratch(Device::cuda, 1 << 20);

  const auto prepare = [&](std::uint64_t round) {
    for (int i = 0; i < 3; ++i) {
      const Bytes text = message(seed + round, rank, i, bytes);
      ASSERT_EQ(cudaMemcpy(filled[i].data(), text.data(), bytes, cudaMemcpyHostToDevice),
                cudaSuccess);
    }
    const Bytes values = values_of(seed + round, rank, bytes / 4 * size, fp32);
    ASSERT_EQ(cudaMemcpy(filled[3].data(), values.data(), values.size(), cudaMemcpyHostToDevice),
              cudaSuccess);
    for (auto* all : {&send, &got, &seen})
      for (Buffer& one : *all) ASSERT_EQ(cudaMemset(one.data(), 0xA5, one.bytes()), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  };
  const auto judge = [&](std::uint64_t round) {
    comm::transport_of(world).wait(as_stream(own.stream), "started");
    comm::transport_of(world).wait(as_stream(beside.stream), "started");
    Bytes gathered, exchanged;
    const std::size_t part = bytes / size / 4 * 4;
    for (int p = 0; p < size; ++p) {
      append(gathered, message(seed + round, p, 0, bytes));
      const Bytes all = message(seed + round, p, 2, bytes);
      append(exchanged, Bytes(all.begin() + static_cast<std::ptrdiff_t>(rank * part),
                              all.begin() + static_cast<std::ptrdiff_t>((rank + 1) * part)));
    }
    EXPECT_TRUE(on_host(seen[0], gathered.size()) == gathered) << round;
    EXPECT_TRUE(on_host(seen[1], bytes) ==
                message(seed + round, (rank + size - 1) % size, 1, bytes))
        << round;
    EXPECT_TRUE(on_host(seen[2], exchanged.size()) == exchanged) << round;
    const Bytes sum = on_host(seen[3], bytes);
    std::vector<Bytes> values;
    for (int p = 0; p < size; ++p)
      values.push_back(values_of(seed + round, p, bytes / 4 * size, fp32));
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(bytes / 4); ++i) {
      double exact = 0;
      for (int p = 0; p < size; ++p)
        exact +=
            load_element(values[p].data(), fp32, rank * static_cast<std::int64_t>(bytes / 4) + i);
      ASSERT_NEAR(load_element(sum.data(), fp32, i), exact, 1e-5) << round;
    }
  };

  for (std::uint64_t round = 0; round < 3; ++round) {
    prepare(round);
    start_and_wait(world, seed + round, own.stream, beside.stream, filled, send, got, seen,
                   scratch);
    judge(round);
  }

  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(own.stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(fork, own.stream), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(beside.stream, fork, 0), cudaSuccess);
  start_and_wait(world, seed, own.stream, beside.stream, filled, send, got, seen, scratch);
  ASSERT_EQ(cudaEventRecord(join, beside.stream), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(own.stream, join, 0), cudaSuccess);
  ASSERT_EQ(cudaStreamEndCapture(own.stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  for (std::uint64_t round = 10; round < 14; ++round) {
    prepare(round);
    ASSERT_EQ(cudaGraphLaunch(exec, own.stream), cudaSuccess);
    judge(round);
    if (round % 2) {  // and what is not captured goes on beside it
      prepare(round + 100);
      start_and_wait(world, seed, own.stream, beside.stream, filled, send, got, seen, scratch);
      judge(round + 100);
    }
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaEventDestroy(fork);
  cudaEventDestroy(join);
}

TEST(Nccl, TestSaysWhenATransferIsDoneAndNeverOfACapturedOne) {
  const Communicator world = gpu_world();
  const OwnStream own;
  Buffer send(Device::cuda, 1000), got(Device::cuda, 1000);
  comm::Transfer one = comm::transport_of(world).start_shift(send.data(), got.data(), 1000, 1,
                                                             as_stream(own.stream), "ring");
  while (!one.test()) std::this_thread::yield();
  one.wait(as_stream(own.stream));
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(own.stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  one = comm::transport_of(world).start_shift(send.data(), got.data(), 1000, 1,
                                              as_stream(own.stream), "ring");
  EXPECT_FALSE(one.test());
  one.wait(as_stream(own.stream));
  EXPECT_EQ(cudaStreamEndCapture(own.stream, &graph), cudaSuccess);
  cudaGraphDestroy(graph);
}

TEST(Nccl, ADroppedTransferIsMadeAllTheSame) {
  const Communicator world = gpu_world();
  const OwnStream own;
  const std::uint64_t seed = shared_seed(world);
  const Buffer mine = on_gpu(message(seed, world.rank(), 0, 5000));
  for (int turn = 0; turn < 20; ++turn) {  // more than the events at first
    const Buffer got = poisoned(5000 * world.size());
    {
      const comm::Transfer dropped = comm::transport_of(world).start_all_gather(
          mine.data(), got.data(), 5000, as_stream(own.stream), "dropped");
    }
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    Bytes expected;
    for (int p = 0; p < world.size(); ++p) append(expected, message(seed, p, 0, 5000));
    EXPECT_TRUE(on_host(got, expected.size()) == expected);
  }
}

TEST(Nccl, PartsHaveEveryCollectiveInterleavedWithTheWhole) {
  const Communicator world = gpu_world();
  const auto part = world.split(world.rank() % 2, -world.rank());
  ASSERT_TRUE(part);
  EXPECT_EQ(part->size(), (world.size() + 1 - world.rank() % 2) / 2);
  EXPECT_THAT(part->describe(), HasSubstr("NCCL"));
  check_collectives(*part);
  check_collectives(world);
  check_sums(*part);
  const auto alone = part->split(part->rank());
  ASSERT_TRUE(alone);
  check_collectives(*alone);
  const auto some = world.split(world.rank() == 0 ? -1 : 0);
  EXPECT_EQ(some.has_value(), world.rank() != 0);
  world.barrier("the whole lives on");
}

/// A rank of a part stays away: the streams come free, it is named with both numbers, and the whole
/// lives on.
TEST(Nccl, AMissingRankOfAPartIsNamedAndTheWholeLivesOn) {
  const Communicator world = gpu_world(std::chrono::seconds(4));
  if (world.size() < 2) GTEST_SKIP() << "takes two ranks";
  const int absent = world.size() - 1;
  const auto part = world.split(0, -world.rank());
  const OwnStream own;
  Buffer send(Device::cuda, 1 << 20), got(Device::cuda, std::size_t(world.size()) << 20);
  if (world.rank() == absent) {
    std::this_thread::sleep_for(std::chrono::seconds(6));
    EXPECT_THROW(part->barrier("back again"), RankError);
  } else {
    try {
      comm::Transfer transfer = comm::transport_of(*part).start_all_gather(
          send.data(), got.data(), 1 << 20, as_stream(own.stream), "states");
      transfer.wait(as_stream(own.stream));
      comm::transport_of(*part).wait(as_stream(own.stream), "states");
      ADD_FAILURE() << "no error";
    } catch (const RankError& error) {
      EXPECT_EQ(error.kind(), ErrorKind::timeout);
      EXPECT_EQ(error.rank(), 0);
      EXPECT_THAT(error.what(), HasSubstr("Rank 0 (" + std::to_string(absent) + " of all)"));
    }
    EXPECT_EQ(cudaStreamSynchronize(own.stream), cudaSuccess);
  }
  MPI_Barrier(MPI_COMM_WORLD);
  world.barrier("the whole lives on");
}

TEST(Nccl, EveryCollective) {
  const Communicator world = gpu_world();
  EXPECT_EQ(world.device(), Device::cuda);
  EXPECT_THAT(world.describe(), HasSubstr("NCCL"));
  check_collectives(world);
}

TEST(Nccl, EveryCollectiveOverTheCallersCommunicator) {
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
    world.make_current();
    EXPECT_EQ(world.rank(), rank);
    EXPECT_EQ(world.size(), size);
    const auto texts =
        world.gather(std::string(static_cast<std::size_t>(rank) * 1000, 'x'), "test");
    for (int p = 0; p < size; ++p) EXPECT_EQ(texts[p].size(), static_cast<std::size_t>(p) * 1000);
    check_collectives(world);
    const auto part = world.split(0, -rank);  // whose messages travel over NCCL too
    ASSERT_TRUE(part);
    check_collectives(*part);
    EXPECT_FALSE(world.split(-1));
    world.abort("no more");
    EXPECT_THROW(part->barrier("ended"), RankError);
  }
  EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);  // it stayed ours
}

TEST(Nccl, CollectivesCanBeCapturedAndReplayed) {
  const Communicator world = gpu_world();
  const OwnStream own;
  const std::uint64_t seed = shared_seed(world);
  const int size = world.size();
  const std::size_t bytes = 10000;
  Buffer mine(Device::cuda, bytes), got(Device::cuda, bytes * size);

  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(own.stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  comm::transport_of(world).all_gather(mine.data(), got.data(), bytes, as_stream(own.stream),
                                       "captured");
  ASSERT_EQ(cudaStreamEndCapture(own.stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);

  for (int round = 0; round < 20; ++round) {
    const Bytes sent = message(seed + round, world.rank(), 0, bytes);
    ASSERT_EQ(cudaMemcpy(mine.data(), sent.data(), bytes, cudaMemcpyHostToDevice), cudaSuccess);
    ASSERT_EQ(cudaMemset(got.data(), 0xA5, bytes * size), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    ASSERT_EQ(cudaGraphLaunch(exec, own.stream), cudaSuccess);
    comm::transport_of(world).wait(as_stream(own.stream), "replay");
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
    comm::transport_of(world).all_gather(static_cast<std::uint64_t*>(send.data()) + i,
                                         static_cast<std::uint64_t*>(got.data()) + i * size, 8,
                                         as_stream(own.stream), "round");
  comm::transport_of(world).wait(as_stream(own.stream), "rounds");
  std::vector<std::uint64_t> all(std::size_t(rounds) * size);
  got.download(all.data());
  for (int i = 0; i < rounds; ++i)
    for (int p = 0; p < size; ++p) ASSERT_EQ(all[i * size + p], 1000003u * i + p);
}

/// A rank that stays away is named, the stream comes free, and every later call throws the same.
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
    comm::transport_of(world).all_gather(send.data(), got.data(), 1 << 20, as_stream(own.stream),
                                         "states");
    comm::transport_of(world).wait(as_stream(own.stream), "states");
    ADD_FAILURE() << "no error";
  } catch (const RankError& error) {
    EXPECT_EQ(error.kind(), ErrorKind::timeout);
    EXPECT_EQ(error.rank(), absent);
    EXPECT_EQ(error.step(), "states");
    what = error.what();
  }
  EXPECT_EQ(cudaStreamSynchronize(own.stream), cudaSuccess);
  try {
    comm::transport_of(world).all_gather(send.data(), got.data(), 1 << 20, as_stream(own.stream),
                                         "later");
    ADD_FAILURE() << "went on";
  } catch (const RankError& error) {
    EXPECT_THAT(
        error.what(),
        ::testing::StartsWith("The communicator had ended before this call, at 'states': " + what));
  }
}

/// Nothing waits: the watchdog alone frees the stream, and the next call reports why.
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
  comm::transport_of(world).all_gather(send.data(), got.data(), 1 << 20, as_stream(own.stream),
                                       "states");
  EXPECT_EQ(cudaStreamSynchronize(own.stream), cudaSuccess);
  try {
    comm::transport_of(world).wait(as_stream(own.stream), "later");
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
}  // namespace longspan::tests
