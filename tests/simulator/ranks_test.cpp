// Ranks on simulated GPUs: memory that other processes map, and the stand-in for NCCL, between
// processes and between threads. A peer process is this program again, with a role.
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nccl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "kernels/simulated/include/kernels/cuda/common/launch.hpp"
#include "kernels/simulated/thread.hpp"

namespace longspan::simulated {
namespace {

using kernels::cuda::launch_kernel;

constexpr int kRanks = 2;
constexpr int kPeersSocket = 3;  // file of a peer by which it talks with the test

void works(cudaError_t status) { ASSERT_EQ(status, cudaSuccess) << cudaGetErrorString(status); }
void works(ncclResult_t result) {
  ASSERT_EQ(result, ncclSuccess) << ncclGetErrorString(result) << ": " << ncclGetLastError(nullptr);
}

// ---- talk between processes --------------------------------------------------------------------

template <class T>
void send(int socket, const T& value) {
  ASSERT_EQ(write(socket, &value, sizeof value), static_cast<ssize_t>(sizeof value));
}
/// Zero, where the other process has ended.
template <class T>
T receive(int socket) {
  T value{};
  return read(socket, &value, sizeof value) == static_cast<ssize_t>(sizeof value) ? value : T{};
}

using Role = void (*)(int socket);
std::map<std::string, Role>& roles();

/// A process that takes a role.
class Peer {
 public:
  explicit Peer(const std::string& role) {
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    process_ = fork();
    if (process_ == 0) {
      dup2(fcntl(ends[1], F_DUPFD, kPeersSocket + 1), kPeersSocket);
      execl("/proc/self/exe", "peer", "--role", role.c_str(), nullptr);
      _exit(127);
    }
    close(ends[1]);
    socket_ = ends[0];
  }
  ~Peer() { end(); }
  int socket() const { return socket_; }
  void kill() const { ::kill(process_, SIGKILL); }
  void expect_success() { EXPECT_EQ(end(), 0); }

 private:
  int end() {
    if (process_ == 0) return 0;
    close(socket_);
    int status = -1;
    waitpid(process_, &status, 0);
    process_ = 0;
    return status;
  }
  pid_t process_ = 0;
  int socket_ = -1;
};

// ---- mapped memory -----------------------------------------------------------------------------

constexpr std::size_t kBuffer = 10000;

void send_seven_at(std::byte* place) { send_word(place, 7, 4, Site::current()); }
void wait_for_seven(const std::byte* place) {
  while (fetch_word(place, 4, Site::current()) != 7) spin(Site::current());
}

/// Maps the test's memory, reads and writes it; once more on request.
void map_memory(int socket) {
  const auto handle = receive<cudaIpcMemHandle_t>(socket);
  void* mapped = nullptr;
  works(cudaIpcOpenMemHandle(&mapped, handle, cudaIpcMemLazyEnablePeerAccess));
  auto* const peer_buffer = static_cast<std::byte*>(mapped);
  std::byte last{};
  works(cudaMemcpy(&last, peer_buffer + kBuffer - 1, 1, cudaMemcpyDefault));
  EXPECT_EQ(last, std::byte{42});
  EXPECT_NE(cudaMemcpy(&last, peer_buffer + kBuffer, 1, cudaMemcpyDefault), cudaSuccess);
  launch_kernel(send_seven_at, {1, 1}, peer_buffer);
  send(socket, 'q');  // queued, and this thread does not use its GPU any more
  receive<char>(socket);
  works(cudaIpcCloseMemHandle(mapped));
  EXPECT_NE(cudaIpcCloseMemHandle(mapped), cudaSuccess);
  send(socket, 'c');
  receive<char>(socket);
}

std::byte* make_peer_buffer(cudaIpcMemHandle_t& handle) {
  std::byte* peer_buffer = nullptr;
  works(cudaMalloc(reinterpret_cast<void**>(&peer_buffer), kBuffer));
  works(cudaMemset(peer_buffer, 42, kBuffer));
  works(cudaDeviceSynchronize());
  works(cudaIpcGetMemHandle(&handle, peer_buffer));
  return peer_buffer;
}

TEST(MappedMemory, IsWhatBothSee) {
  cudaIpcMemHandle_t handle{};
  std::byte* const peer_buffer = make_peer_buffer(handle);
  Peer peer("map memory");
  send(peer.socket(), handle);
  launch_kernel(wait_for_seven, {1, 1}, peer_buffer);
  EXPECT_EQ(receive<char>(peer.socket()), 'q');
  while (cudaStreamQuery(nullptr) == cudaErrorNotReady) std::this_thread::yield();
  works(cudaDeviceSynchronize());
  send(peer.socket(), 'c');
  EXPECT_EQ(receive<char>(peer.socket()), 'c');
  works(cudaFree(peer_buffer));
  send(peer.socket(), 'e');
  peer.expect_success();
  static_cast<void>(cudaGetLastError());
}

TEST(MappedMemoryDeathTest, IsNotFreedWhileAPeerHasIt) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto free_early = [] {
    cudaIpcMemHandle_t handle{};
    std::byte* const peer_buffer = make_peer_buffer(handle);
    Peer peer("map memory");
    send(peer.socket(), handle);
    receive<char>(peer.socket());
    cudaFree(peer_buffer);
  };
  EXPECT_DEATH(free_early(), "freed while process");
}

TEST(MappedMemory, IsTheSameForThreadsOfAProcess) {
  cudaIpcMemHandle_t handle{};
  std::byte* const peer_buffer = make_peer_buffer(handle);
  void* mapped = nullptr;
  works(cudaIpcOpenMemHandle(&mapped, handle, cudaIpcMemLazyEnablePeerAccess));
  EXPECT_EQ(mapped, peer_buffer);
  works(cudaIpcCloseMemHandle(mapped));
  works(cudaFree(peer_buffer));
  EXPECT_NE(cudaIpcOpenMemHandle(&mapped, handle, cudaIpcMemLazyEnablePeerAccess), cudaSuccess);
  static_cast<void>(cudaGetLastError());
}

// ---- NCCL --------------------------------------------------------------------------------------

ncclUniqueId fresh_id() {
  ncclUniqueId id{};
  works(ncclGetUniqueId(&id));
  return id;
}

/// Waits for the operation in progress of a communicator that does not block.
ncclResult_t settled(ncclComm_t comm) {
  ncclResult_t result = ncclInProgress;
  while (result == ncclInProgress) {
    std::this_thread::yield();
    works(ncclCommGetAsyncError(comm, &result));
  }
  return result;
}

/// A rank: its GPU, its stream, and memory for `bytes` to send and to receive from each rank.
struct Rank {
  Rank(int rank, std::size_t count) : number(rank), bytes(count) {
    works(cudaSetDevice(rank));
    works(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    works(cudaMalloc(&send, bytes));
    works(cudaMalloc(reinterpret_cast<void**>(&got), kRanks * bytes));
    works(cudaMemset(send, 10 + rank, bytes));
    works(cudaDeviceSynchronize());
  }
  ~Rank() {
    works(cudaFree(send));
    works(cudaFree(got));
    works(cudaStreamDestroy(stream));
  }
  /// The byte received in a rank's place, where all bytes are the same; otherwise -1.
  int from(int rank) const {
    std::vector<unsigned char> all(bytes);
    works(cudaMemcpy(all.data(), got + static_cast<std::size_t>(rank) * bytes, bytes,
                     cudaMemcpyDefault));
    for (const unsigned char byte : all)
      if (byte != all[0]) return -1;
    return all[0];
  }
  void forget() const {
    works(cudaMemset(got, 0, kRanks * bytes));
    works(cudaDeviceSynchronize());
  }
  void gather(ncclComm_t comm) const {
    const ncclResult_t result = ncclAllGather(send, got, bytes, ncclInt8, comm, stream);
    EXPECT_TRUE(result == ncclSuccess || result == ncclInProgress);
    works(settled(comm));
  }

  int number;
  std::size_t bytes;
  cudaStream_t stream = nullptr;
  void* send = nullptr;
  std::byte* got = nullptr;
};

void gather_and_exchange(ncclComm_t comm, int number) {
  for (const std::size_t bytes : {1ul, 1000ul, 300000ul}) {
    const Rank rank(number, bytes);
    for (int turn = 0; turn < 5; ++turn) {
      rank.forget();
      rank.gather(comm);
      works(cudaStreamSynchronize(rank.stream));
      for (int r = 0; r < kRanks; ++r) ASSERT_EQ(rank.from(r), 10 + r);
    }
    rank.forget();
    works(ncclGroupStart());
    for (int peer = 0; peer < kRanks; ++peer) {
      std::byte* const place = rank.got + static_cast<std::size_t>(peer) * bytes;
      works(ncclSend(rank.send, bytes, ncclInt8, peer, comm, rank.stream));
      works(ncclRecv(place, bytes, ncclInt8, peer, comm, rank.stream));
    }
    const ncclResult_t result = ncclGroupEnd();
    EXPECT_TRUE(result == ncclSuccess || result == ncclInProgress);
    works(settled(comm));
    works(cudaStreamSynchronize(rank.stream));
    for (int r = 0; r < kRanks; ++r) ASSERT_EQ(rank.from(r), 10 + r);
  }
}

/// Sums of small whole numbers are exact in every type and order. In place, and in a group with
/// other operations.
void add_and_broadcast(ncclComm_t comm, int number) {
  constexpr std::size_t kCount = 70001;
  const Rank rank(number, kRanks * kCount * sizeof(float));
  std::vector<float> values(kRanks * kCount);
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>(i % 1000 + static_cast<std::size_t>(number));
  const std::size_t bytes = kCount * sizeof(float);
  auto* const send = static_cast<float*>(rank.send);
  const auto fill = [&] {
    works(cudaMemcpy(send, values.data(), kRanks * bytes, cudaMemcpyDefault));
    works(cudaMemset(rank.got, number == 1 ? 9 : 0, bytes));
    works(cudaDeviceSynchronize());
  };
  const auto expect_sum = [&](const void* place) {
    std::vector<float> sum(kCount);
    works(cudaMemcpy(sum.data(), place, bytes, cudaMemcpyDefault));
    for (std::size_t i = 0; i < kCount; ++i)
      ASSERT_EQ(sum[i], static_cast<float>(
                            2 * ((static_cast<std::size_t>(number) * kCount + i) % 1000) + 1));
  };
  fill();
  float* const own = send + static_cast<std::size_t>(number) * kCount;
  EXPECT_NE(ncclReduceScatter(send, own, kCount, ncclFloat32, ncclSum, comm, rank.stream),
            ncclInvalidArgument);
  works(settled(comm));
  works(cudaStreamSynchronize(rank.stream));
  expect_sum(own);

  fill();
  auto* const sum = rank.got + bytes;
  works(ncclGroupStart());
  works(ncclReduceScatter(send, sum, kCount, ncclFloat32, ncclSum, comm, rank.stream));
  works(ncclBroadcast(rank.got, rank.got, bytes, ncclInt8, 1, comm, rank.stream));
  const ncclResult_t result = ncclGroupEnd();
  EXPECT_TRUE(result == ncclSuccess || result == ncclInProgress);
  works(settled(comm));
  works(cudaStreamSynchronize(rank.stream));
  expect_sum(sum);
  std::vector<unsigned char> came(bytes);
  works(cudaMemcpy(came.data(), rank.got, bytes, cudaMemcpyDefault));
  for (const unsigned char byte : came) ASSERT_EQ(byte, 9);

  EXPECT_EQ(ncclReduceScatter(send, sum, 1, ncclFloat32, ncclMax, comm, rank.stream),
            ncclInvalidArgument);
  EXPECT_EQ(ncclBroadcast(send, sum, 1, ncclInt8, kRanks, comm, rank.stream), ncclInvalidArgument);
}

/// Captured, replayed, and two communicators split from one.
void replay_and_split(ncclComm_t comm, int number) {
  const Rank rank(number, 5000);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  works(cudaStreamBeginCapture(rank.stream, cudaStreamCaptureModeThreadLocal));
  rank.gather(comm);
  works(cudaStreamEndCapture(rank.stream, &graph));
  works(cudaGraphInstantiate(&replay, graph, 0));
  works(cudaGraphDestroy(graph));
  for (int turn = 0; turn < 10; ++turn) {
    rank.forget();
    works(cudaGraphLaunch(replay, rank.stream));
    works(cudaStreamSynchronize(rank.stream));
    for (int r = 0; r < kRanks; ++r) ASSERT_EQ(rank.from(r), 10 + r);
  }
  works(cudaGraphExecDestroy(replay));

  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  ncclComm_t both = nullptr, alone = nullptr;
  for (ncclComm_t* child : {&both, &alone}) {
    const int color = child == &both ? 0 : number;
    const ncclResult_t result = ncclCommSplit(comm, color, -number, child, &config);
    EXPECT_TRUE(result == ncclSuccess || result == ncclInProgress);
    works(settled(comm));
    works(settled(*child));
  }
  int size = 0, place = -1;
  works(ncclCommCount(alone, &size));
  EXPECT_EQ(size, 1);
  works(ncclCommCount(both, &size));
  works(ncclCommUserRank(both, &place));
  EXPECT_EQ(size, kRanks);
  EXPECT_EQ(place, kRanks - 1 - number) << "the key decides";
  rank.gather(both);
  works(cudaStreamSynchronize(rank.stream));
  for (int r = 0; r < kRanks; ++r) EXPECT_EQ(rank.from(r), 10 + kRanks - 1 - r);
  for (ncclComm_t child : {both, alone}) {
    EXPECT_NE(ncclCommFinalize(child), ncclInvalidArgument);
    works(settled(child));
    works(ncclCommDestroy(child));
  }
}

void take_part(const ncclUniqueId& id, int number, bool blocking) {
  works(cudaSetDevice(number));
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = blocking;
  ncclComm_t comm = nullptr;
  const ncclResult_t made = ncclCommInitRankConfig(&comm, kRanks, id, number, &config);
  EXPECT_TRUE(made == ncclSuccess || (!blocking && made == ncclInProgress));
  works(settled(comm));
  gather_and_exchange(comm, number);
  add_and_broadcast(comm, number);
  replay_and_split(comm, number);
  works(ncclCommDestroy(comm));
}

void run_threads(const std::function<void(int)>& work) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) threads.emplace_back(work, rank);
  for (std::thread& thread : threads) thread.join();
}

TEST(Nccl, BetweenThreads) {
  for (const bool blocking : {true, false}) {
    const ncclUniqueId id = fresh_id();
    run_threads([&](int rank) { take_part(id, rank, blocking); });
  }
}

void take_part_as_peer(int socket) {
  const bool blocking = receive<bool>(socket);
  take_part(receive<ncclUniqueId>(socket), 1, blocking);
}

TEST(Nccl, BetweenProcesses) {
  for (const bool blocking : {true, false}) {
    Peer peer("take part");
    const ncclUniqueId id = fresh_id();
    send(peer.socket(), blocking);
    send(peer.socket(), id);
    take_part(id, 0, blocking);
    peer.expect_success();
  }
}

TEST(Nccl, AnAbortFreesTheStream) {
  const ncclUniqueId id = fresh_id();
  std::atomic<bool> has_waited = false;
  run_threads([&](int number) {
    const Rank rank(number, 100);
    ncclComm_t comm = nullptr;
    works(ncclCommInitRank(&comm, kRanks, id, number));
    if (number == 0) {
      rank.gather(comm);
      for (int i = 0; i < 50; ++i) EXPECT_EQ(cudaStreamQuery(rank.stream), cudaErrorNotReady);
      has_waited = true;
    }
    while (!has_waited) std::this_thread::yield();
    works(ncclCommAbort(comm));
    works(cudaStreamSynchronize(rank.stream));
  });
}

TEST(Nccl, TwoRanksOfOneGpuAreRefused) {
  const ncclUniqueId id = fresh_id();
  run_threads([&](int number) {
    ncclComm_t comm = nullptr;
    EXPECT_EQ(ncclCommInitRank(&comm, kRanks, id, number), ncclInvalidUsage);
    works(ncclCommAbort(comm));
  });
}

void come_and_wait(int socket) {
  works(cudaSetDevice(1));
  ncclComm_t comm = nullptr;
  works(ncclCommInitRank(&comm, kRanks, receive<ncclUniqueId>(socket), 1));
  send(socket, 'h');
  receive<char>(socket);
}

TEST(Nccl, AKilledPeerIsARemoteError) {
  Peer peer("come and wait");
  const ncclUniqueId id = fresh_id();
  send(peer.socket(), id);
  const Rank rank(0, 100);
  ncclComm_t comm = nullptr;
  works(ncclCommInitRank(&comm, kRanks, id, 0));
  EXPECT_EQ(receive<char>(peer.socket()), 'h');
  rank.gather(comm);
  EXPECT_EQ(cudaStreamQuery(rank.stream), cudaErrorNotReady);
  peer.kill();
  ncclResult_t result = ncclSuccess;
  while (result == ncclSuccess) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    works(ncclCommGetAsyncError(comm, &result));
  }
  EXPECT_EQ(result, ncclRemoteError);
  EXPECT_EQ(cudaStreamQuery(rank.stream), cudaErrorNotReady) << "until it is aborted";
  works(ncclCommAbort(comm));
  works(cudaStreamSynchronize(rank.stream));
  static_cast<void>(cudaGetLastError());
}

std::map<std::string, Role>& roles() {
  static std::map<std::string, Role> all{
      {"map memory", map_memory},
      {"take part", take_part_as_peer},
      {"come and wait", come_and_wait},
  };
  return all;
}

}  // namespace
}  // namespace longspan::simulated

int main(int argc, char** argv) {
  setenv("LONGSPAN_SIMULATED_GPUS", "2", 1);
  testing::InitGoogleTest(&argc, argv);
  if (argc == 3 && std::string(argv[1]) == "--role") {
    longspan::simulated::roles().at(argv[2])(longspan::simulated::kPeersSocket);
    return testing::Test::HasFailure() ? 1 : 0;
  }
  return RUN_ALL_TESTS();
}
