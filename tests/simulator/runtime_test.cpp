// The stand-in for CUDA's runtime: what streams allow and what they do not, captures, memory,
// errors on demand. Ranks and NCCL are in ranks_test.cpp.
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <set>
#include <thread>
#include <vector>

#include "comm/cuda/stream_flags.hpp"
#include "kernels/simulated/include/kernels/cuda/common/launch.hpp"
#include "kernels/simulated/runtime/faults.hpp"
#include "kernels/simulated/runtime/memory.hpp"
#include "kernels/simulated/thread.hpp"
#include "longspan/error.hpp"

namespace longspan::simulated {
namespace {

using comm::FlagOperation;
using comm::queue_flags;
using kernels::cuda::launch_kernel;
using kernels::cuda::LaunchConfig;

constexpr int kSchedules = 40;

void works(cudaError_t status) { ASSERT_EQ(status, cudaSuccess) << cudaGetErrorString(status); }

// ---- kernels -----------------------------------------------------------------------------------

void set(int* word, int value) { *word = value; }
void add(int* sum, int value) {
  const int before = *sum;
  for (int i = 0; i < 5; ++i) may_yield(Site::current());
  *sum = before + value;
}
/// to = 10 to + value, which shows the order. Atomically, for streams that do not wait.
void append(int* to, int value) {
  for (int i = 0; i < 5; ++i) may_yield(Site::current());
  const std::atomic_ref word(*to);
  word = word * 10 + value;
}
void wait_for(const std::atomic<int>* word, int value) {
  while (*word != value) spin(Site::current());
}
void note_start(std::atomic<int>* word) {
  let_next_kernel_start();
  wait_for(word, 1);
}
void release_the_one_before(std::atomic<int>* word) {
  *word = 1;
  wait_for_kernels_before(Site::current());
}

struct GpuInts {
  explicit GpuInts(std::size_t count) {
    EXPECT_EQ(cudaMalloc(reinterpret_cast<void**>(&data), count * sizeof(int)), cudaSuccess);
    EXPECT_EQ(cudaMemset(data, 0, count * sizeof(int)), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
  ~GpuInts() { EXPECT_EQ(cudaFree(data), cudaSuccess); }
  int at(int index) const {
    int value = 0;
    EXPECT_EQ(cudaMemcpy(&value, data + index, sizeof value, cudaMemcpyDeviceToHost), cudaSuccess);
    return value;
  }
  int* data = nullptr;
};

struct OwnStream {
  explicit OwnStream(unsigned flags = cudaStreamNonBlocking) {
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream, flags), cudaSuccess);
  }
  ~OwnStream() { EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess); }
  operator cudaStream_t() const { return stream; }
  cudaStream_t stream = nullptr;
};

/// The results of `find` in many schedules.
template <class Find>
std::set<int> found_in_schedules(const Find& find) {
  const std::uint64_t own = schedule_seed();
  std::set<int> found;
  for (int i = 0; i < kSchedules; ++i) {
    begin_schedule(own + 100 + static_cast<std::uint64_t>(i));
    found.insert(find());
  }
  begin_schedule(own);
  return found;
}

// ---- streams -----------------------------------------------------------------------------------

TEST(Streams, KeepTheirOrder) {
  const auto order = [] {
    const GpuInts word(1);
    const OwnStream stream;
    for (int i = 1; i <= 5; ++i) launch_kernel(append, {1, 1, stream}, word.data, i);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    return word.at(0);
  };
  EXPECT_EQ(found_in_schedules(order), std::set{12345});
}

TEST(Streams, DoNotWaitForEachOther) {
  const auto order = [] {
    const GpuInts word(1);
    const OwnStream one, other;
    launch_kernel(append, {1, 1, one}, word.data, 1);
    launch_kernel(append, {1, 1, other}, word.data, 2);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    return word.at(0);
  };
  EXPECT_THAT(found_in_schedules(order), ::testing::IsSupersetOf({12, 21}));
}

TEST(Streams, WaitForFlags) {
  const auto order = [] {
    const GpuInts word(1), flag(2);
    auto* const raised = reinterpret_cast<std::byte*>(flag.data);
    const OwnStream one, other;
    queue_flags(one, {{FlagOperation::wait, raised}, {FlagOperation::lower, raised}});
    launch_kernel(append, {1, 1, one}, word.data, 1);
    EXPECT_EQ(cudaStreamQuery(one), cudaErrorNotReady);
    launch_kernel(append, {1, 1, other}, word.data, 2);
    queue_flags(other, {{FlagOperation::raise, raised}});
    EXPECT_EQ(cudaStreamSynchronize(one), cudaSuccess);
    EXPECT_EQ(flag.at(0), 0);
    static_cast<void>(cudaGetLastError());
    return word.at(0);
  };
  EXPECT_EQ(found_in_schedules(order), std::set{21});
}

TEST(Streams, DoNotWaitForFreedFlags) {
  const GpuInts word(1), flag(2);
  auto* const freed = reinterpret_cast<std::byte*>(flag.data);
  const OwnStream one, other;
  for (int i = 0; i < 2; ++i)
    queue_flags(one, {{FlagOperation::wait, freed}, {FlagOperation::lower, freed}});
  launch_kernel(append, {1, 1, one}, word.data, 1);
  queue_flags(other, {{FlagOperation::free, freed}});
  works(cudaStreamSynchronize(one));
  EXPECT_EQ(word.at(0), 1);
}

TEST(Streams, TakeNoFlagsThatLieElsewhere) {
  const GpuInts flag(2);
  const OwnStream stream;
  std::uint64_t of_the_host = 0;
  EXPECT_THROW(
      queue_flags(stream, {{FlagOperation::wait, reinterpret_cast<std::byte*>(&of_the_host)}}),
      BackendError);
  EXPECT_THROW(
      queue_flags(stream, {{FlagOperation::wait, reinterpret_cast<std::byte*>(flag.data) + 4}}),
      BackendError);
  static_cast<void>(cudaGetLastError());
}

TEST(Streams, WaitForEvents) {
  const auto order = [] {
    const GpuInts word(1);
    const OwnStream one, other;
    cudaEvent_t event = nullptr;
    EXPECT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
    launch_kernel(append, {1, 1, one}, word.data, 1);
    EXPECT_EQ(cudaEventRecord(event, one), cudaSuccess);
    EXPECT_EQ(cudaStreamWaitEvent(other, event, 0), cudaSuccess);
    EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
    launch_kernel(append, {1, 1, other}, word.data, 2);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    return word.at(0);
  };
  EXPECT_EQ(found_in_schedules(order), std::set{12});
}

/// A blocking stream and the default one wait for each other; another kind does neither.
TEST(Streams, TheDefaultOneWaitsForThoseThatBlock) {
  const auto order = [](unsigned flags) {
    const GpuInts word(1);
    const OwnStream stream(flags);
    launch_kernel(append, {1, 1, stream}, word.data, 1);
    launch_kernel(append, {1, 1}, word.data, 2);
    launch_kernel(append, {1, 1, stream}, word.data, 3);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
    return word.at(0);
  };
  EXPECT_EQ(found_in_schedules([&] { return order(cudaStreamDefault); }), std::set{123});
  EXPECT_GT(found_in_schedules([&] { return order(cudaStreamNonBlocking); }).size(), 1u);
}

TEST(Streams, DestroyedOnesDoWhatTheyWereGiven) {
  const GpuInts word(1);
  {
    const OwnStream stream;
    launch_kernel(set, {1, 1, stream}, word.data, 7);
  }
  works(cudaDeviceSynchronize());
  EXPECT_EQ(word.at(0), 7);
}

TEST(Streams, AQueryLetsALittleHappen) {
  std::atomic<int>* word = nullptr;
  works(cudaHostAlloc(reinterpret_cast<void**>(&word), 64, cudaHostAllocMapped));
  *word = 0;
  const OwnStream stream;
  launch_kernel(wait_for, {1, 1, stream}, word, 1);
  for (int i = 0; i < 20; ++i) EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
  *word = 1;
  while (cudaStreamQuery(stream) == cudaErrorNotReady) {
  }
  EXPECT_EQ(cudaStreamQuery(stream), cudaSuccess);
  EXPECT_EQ(cudaGetLastError(), cudaErrorNotReady);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  works(cudaFreeHost(word));
}

/// The second kernel frees the first one, which lets it start: both run at the same time.
TEST(Streams, KernelsOverlapWhereBothSaySo) {
  std::atomic<int>* word = nullptr;
  works(cudaHostAlloc(reinterpret_cast<void**>(&word), 64, cudaHostAllocMapped));
  for (const bool in_graph : {false, true}) {
    *word = 0;
    const OwnStream stream;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t replay = nullptr;
    if (in_graph) works(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    launch_kernel(note_start, {1, 1, stream}, word);
    launch_kernel(release_the_one_before,
                  {.grid = 1, .block = 1, .stream = stream, .overlaps = true}, word);
    if (in_graph) {
      works(cudaStreamEndCapture(stream, &graph));
      works(cudaGraphInstantiate(&replay, graph, 0));
      works(cudaGraphLaunch(replay, stream));
      works(cudaGraphDestroy(graph));
    }
    works(cudaStreamSynchronize(stream));
    EXPECT_EQ(*word, 1);
    if (in_graph) works(cudaGraphExecDestroy(replay));
  }
  works(cudaFreeHost(word));
}

TEST(StreamsDeathTest, KernelsThatCannotGoOnAreSeenToStand) {
  EXPECT_DEATH(
      {
        int unused = 0;
        launch_kernel(
            +[](int*) { meet(3, "a meeting of two", nullptr, nullptr, false, {}); }, {1, 2},
            &unused);
        launch_kernel(
            +[](int*) { block_barrier(1, 64, true, false, "a barrier", {}); }, {1, 32}, &unused);
        cudaDeviceSynchronize();
      },
      "nothing can go on");
}

// ---- events ------------------------------------------------------------------------------------

TEST(Events, MeasureTime) {
  const GpuInts word(1);
  cudaEvent_t from = nullptr, to = nullptr, untimed = nullptr;
  works(cudaEventCreate(&from));
  works(cudaEventCreate(&to));
  works(cudaEventCreateWithFlags(&untimed, cudaEventDisableTiming));
  EXPECT_EQ(cudaEventQuery(to), cudaSuccess) << "it has nothing to wait for";
  float ms = -1;
  EXPECT_EQ(cudaEventElapsedTime(&ms, from, to), cudaErrorInvalidResourceHandle);
  works(cudaEventRecord(from, nullptr));
  launch_kernel(add, {1, 1}, word.data, 1);
  works(cudaEventRecord(to, nullptr));
  works(cudaEventRecord(untimed, nullptr));
  EXPECT_EQ(cudaEventElapsedTime(&ms, from, to), cudaErrorNotReady);
  works(cudaEventSynchronize(untimed));
  works(cudaEventElapsedTime(&ms, from, to));
  EXPECT_GT(ms, 0);
  EXPECT_EQ(cudaEventElapsedTime(&ms, from, untimed), cudaErrorInvalidResourceHandle);
  for (cudaEvent_t event : {from, to, untimed}) works(cudaEventDestroy(event));
  EXPECT_EQ(cudaEventDestroy(from), cudaErrorInvalidResourceHandle);
  static_cast<void>(cudaGetLastError());
}

// ---- captures ----------------------------------------------------------------------------------

TEST(Captures, AreReplayed) {
  const GpuInts words(2);
  const OwnStream stream, side;
  cudaEvent_t fork = nullptr, join = nullptr;
  works(cudaEventCreate(&fork));
  works(cudaEventCreate(&join));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  works(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  launch_kernel(add, {1, 1, stream}, words.data, 1);
  works(cudaEventRecord(fork, stream));
  works(cudaStreamWaitEvent(side, fork, 0));
  launch_kernel(append, {1, 1, side}, words.data + 1, 2);
  launch_kernel(add, {1, 1, stream}, words.data, 10);
  works(cudaEventRecord(join, side));
  works(cudaStreamWaitEvent(stream, join, 0));
  launch_kernel(append, {1, 1, stream}, words.data + 1, 3);
  EXPECT_EQ(cudaEventQuery(fork), cudaErrorCapturedEvent);
  EXPECT_EQ(cudaStreamQuery(nullptr), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);

  works(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  works(cudaStreamIsCapturing(stream, &status));
  EXPECT_EQ(status, cudaStreamCaptureStatusActive);
  launch_kernel(add, {1, 1, stream}, words.data, 1);
  works(cudaEventRecord(fork, stream));
  works(cudaStreamWaitEvent(side, fork, 0));
  launch_kernel(append, {1, 1, side}, words.data + 1, 2);
  launch_kernel(add, {1, 1, stream}, words.data, 10);
  works(cudaEventRecord(join, side));
  works(cudaStreamWaitEvent(stream, join, 0));
  launch_kernel(append, {1, 1, stream}, words.data + 1, 3);
  works(cudaStreamEndCapture(stream, &graph));
  works(cudaGraphInstantiate(&replay, graph, 0));
  works(cudaGraphDestroy(graph));
  works(cudaDeviceSynchronize());
  EXPECT_EQ(words.at(0), 0) << "a capture does nothing";
  for (int i = 0; i < 2; ++i) works(cudaGraphLaunch(replay, stream));
  works(cudaGraphExecDestroy(replay));
  works(cudaStreamSynchronize(stream));
  EXPECT_EQ(words.at(0), 22);
  EXPECT_EQ(words.at(1), 2323);
  works(cudaEventDestroy(fork));
  works(cudaEventDestroy(join));
  static_cast<void>(cudaGetLastError());
}

TEST(Captures, TakeFlagsIn) {
  const GpuInts word(1), flag(2);
  auto* const raised = reinterpret_cast<std::byte*>(flag.data);
  const OwnStream stream, other;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  works(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  queue_flags(stream, {{FlagOperation::wait, raised}, {FlagOperation::lower, raised}});
  launch_kernel(append, {1, 1, stream}, word.data, 1);
  works(cudaStreamEndCapture(stream, &graph));
  works(cudaGraphInstantiate(&replay, graph, 0));
  works(cudaGraphDestroy(graph));
  for (int i = 0; i < 2; ++i) {
    works(cudaGraphLaunch(replay, stream));
    launch_kernel(append, {1, 1, other}, word.data, 2);
    queue_flags(other, {{FlagOperation::raise, raised}});
    works(cudaStreamSynchronize(stream));
  }
  works(cudaGraphExecDestroy(replay));
  EXPECT_EQ(word.at(0), 2121);
}

TEST(Captures, DoNotAllowWhatWaits) {
  const GpuInts word(1);
  const OwnStream stream;
  void* memory = nullptr;
  int value = 0;
  const std::vector<std::function<cudaError_t()>> refused = {
      [&] { return cudaMalloc(&memory, 16); },
      [&] { return cudaFree(word.data); },
      [&] { return cudaStreamSynchronize(stream); },
      [&] { return cudaStreamQuery(stream); },
      [&] { return cudaDeviceSynchronize(); },
      [&] { return cudaMemcpy(&value, word.data, 4, cudaMemcpyDefault); },
  };
  cudaGraph_t graph = nullptr;
  for (const auto& call : refused) {
    works(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    EXPECT_EQ(call(), cudaErrorStreamCaptureUnsupported);
    EXPECT_THROW(launch_kernel(set, {1, 1, stream}, word.data, 1), BackendError);
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);
    EXPECT_EQ(graph, nullptr);
  }
  works(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
  works(cudaMalloc(&memory, 16));
  works(cudaFree(memory));
  works(cudaStreamEndCapture(stream, &graph));
  works(cudaGraphDestroy(graph));
  static_cast<void>(cudaGetLastError());
}

/// In other threads: a global capture forbids calls, one of its own thread does not, and a thread
/// can opt out.
TEST(Captures, MindOtherThreadsAsTheirModeSays) {
  for (const auto mode : {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal})
    for (const bool opts_out : {false, true}) {
      const OwnStream stream;
      works(cudaStreamBeginCapture(stream, mode));
      const bool minds = mode == cudaStreamCaptureModeGlobal && !opts_out;
      std::thread([&] {
        auto own = cudaStreamCaptureModeRelaxed;
        if (opts_out) works(cudaThreadExchangeStreamCaptureMode(&own));
        void* memory = nullptr;
        EXPECT_EQ(cudaMalloc(&memory, 16), minds ? cudaErrorStreamCaptureUnsupported : cudaSuccess);
      }).join();
      cudaGraph_t graph = nullptr;
      EXPECT_EQ(cudaStreamEndCapture(stream, &graph),
                minds ? cudaErrorStreamCaptureInvalidated : cudaSuccess);
      if (!minds) works(cudaGraphDestroy(graph));
    }
  static_cast<void>(cudaGetLastError());
}

TEST(Captures, DoNotTakeTheDefaultStreamIn) {
  const GpuInts word(1);
  const OwnStream blocking(cudaStreamDefault);
  cudaGraph_t graph = nullptr;
  works(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeThreadLocal));
  EXPECT_THROW(launch_kernel(set, {1, 1}, word.data, 1), BackendError);
  EXPECT_EQ(cudaStreamEndCapture(blocking, &graph), cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeGlobal),
            cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(cudaStreamEndCapture(blocking, &graph), cudaErrorIllegalState);
  static_cast<void>(cudaGetLastError());
}

TEST(Captures, HaveToBeJoined) {
  const GpuInts word(1);
  const OwnStream stream, side;
  cudaEvent_t event = nullptr;
  cudaGraph_t graph = nullptr;
  works(cudaEventCreate(&event));
  works(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  works(cudaEventRecord(event, stream));
  works(cudaStreamWaitEvent(side, event, 0));
  launch_kernel(set, {1, 1, side}, word.data, 1);
  EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureUnjoined);
  launch_kernel(set, {1, 1, side}, word.data, 2);  // both are ordinary streams again
  works(cudaStreamSynchronize(side));
  EXPECT_EQ(word.at(0), 2);
  works(cudaEventDestroy(event));
  static_cast<void>(cudaGetLastError());
}

// ---- memory ------------------------------------------------------------------------------------

TEST(Memory, IsPoisonedAndBounded) {
  std::byte* memory = nullptr;
  constexpr std::size_t kBytes = 1000;
  works(cudaMalloc(reinterpret_cast<void**>(&memory), kBytes));
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory) % 256, 0u);
  std::vector<std::byte> host(2 * kBytes);
  works(cudaMemcpy(host.data(), memory, kBytes, cudaMemcpyDefault));
  EXPECT_EQ(host[0], std::byte{0xff});
  EXPECT_EQ(host[kBytes - 1], std::byte{0xff});
  EXPECT_EQ(cudaMemcpy(host.data(), memory, kBytes + 1, cudaMemcpyDefault), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(host.data(), memory - 1, 4, cudaMemcpyDefault), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(memory, host.data(), 4, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemset(memory + 1, 0, kBytes), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemset(host.data(), 0, 1), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFree(memory + 256), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFreeHost(memory), cudaErrorInvalidValue);
  works(cudaFree(memory));
  EXPECT_EQ(cudaFree(memory), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(host.data(), memory, 4, cudaMemcpyDefault), cudaErrorInvalidValue);
  works(cudaFree(nullptr));
  static_cast<void>(cudaGetLastError());
}

TEST(Memory, Ends) {
  std::size_t before = 0, left = 0, total = 0;
  works(cudaMemGetInfo(&before, &total));
  void *memory = nullptr, *more = nullptr;
  works(cudaMalloc(&memory, 100 << 20));
  works(cudaMemGetInfo(&left, &total));
  EXPECT_EQ(before - left, 100u << 20);
  EXPECT_EQ(cudaMalloc(&more, left + 1), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaMalloc(&more, std::size_t{1} << 50), cudaErrorMemoryAllocation);
  EXPECT_EQ(more, nullptr);
  works(cudaFree(memory));
  works(cudaMemGetInfo(&left, &total));
  EXPECT_EQ(left, before);
  static_cast<void>(cudaGetLastError());
}

TEST(MemoryDeathTest, WritesBehindAnAllocationAreFound) {
  const auto overrun = [](int index) {
    int* words = nullptr;
    cudaMalloc(reinterpret_cast<void**>(&words), 10 * sizeof(int));
    launch_kernel(set, {1, 1}, words + index, 1);
    cudaDeviceSynchronize();
    cudaFree(words);
  };
  EXPECT_DEATH(overrun(10), "");  // just after it
  EXPECT_DEATH(overrun(64), "");  // another page
}

TEST(Memory, ACopyFromPageableMemoryTakesTheBytesAtTheCall) {
  const GpuInts words(1);
  const OwnStream stream;
  int value = 1;
  works(cudaMemcpyAsync(words.data, &value, sizeof value, cudaMemcpyHostToDevice, stream));
  value = 2;
  works(cudaStreamSynchronize(stream));
  EXPECT_EQ(words.at(0), 1);
}

/// And it may arrive after the call has returned: streams that do not wait overtake it.
TEST(Memory, ACopyFromPageableMemoryMayBeOnItsWay) {
  const auto seen = [] {
    const GpuInts words(2);
    const OwnStream stream;
    const int value = 1;
    EXPECT_EQ(cudaMemcpy(words.data, &value, sizeof value, cudaMemcpyHostToDevice), cudaSuccess);
    EXPECT_EQ(
        cudaMemcpyAsync(words.data + 1, words.data, sizeof value, cudaMemcpyDeviceToDevice, stream),
        cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    return words.at(1);
  };
  EXPECT_EQ(found_in_schedules(seen), (std::set{0, 1}));
}

// ---- launches and errors -----------------------------------------------------------------------

TEST(Launches, OfWrongShapesAreRefused) {
  const GpuInts word(1);
  const auto refused = [&](const LaunchConfig& how) {
    EXPECT_THROW(launch_kernel(set, how, word.data, 1), BackendError);
  };
  refused({0, 1});
  refused({1, 0});
  refused({1, 1025});
  refused({1, dim3(64, 32)});
  refused({dim3(1, 65536), 1});
  refused({.grid = 1, .block = 1, .shared_bytes = (48 << 10) + 1});
  const auto* const kernel = reinterpret_cast<const void*>(&set);
  int most = 0;
  works(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
  constexpr auto kShared = cudaFuncAttributeMaxDynamicSharedMemorySize;
  EXPECT_EQ(cudaFuncSetAttribute(kernel, kShared, most + 1), cudaErrorInvalidValue);
  works(cudaFuncSetAttribute(kernel, kShared, most));
  launch_kernel(set, {.grid = 1, .block = 1, .shared_bytes = static_cast<std::size_t>(most)},
                word.data, 5);
  EXPECT_EQ(word.at(0), 5);
  works(cudaFuncSetAttribute(kernel, kShared, 0));
  refused({.grid = 1, .block = 1, .shared_bytes = 16});
  static_cast<void>(cudaGetLastError());
}

TEST(Errors, StayBehindUntilTheyAreTaken) {
  EXPECT_EQ(cudaSetDevice(-1), cudaErrorInvalidDevice);
  int device = -1;
  works(cudaGetDevice(&device));
  EXPECT_EQ(cudaPeekAtLastError(), cudaErrorInvalidDevice);
  std::thread([] { EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess); }).join();
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_STREQ(cudaGetErrorString(cudaErrorMemoryAllocation), "out of memory");
}

TEST(Errors, ComeOnDemand) {
  void* memory = nullptr;
  fail_call("cudaMalloc", 2);
  works(cudaMalloc(&memory, 16));
  works(cudaMemset(memory, 0, 16));
  void* more = nullptr;
  EXPECT_EQ(cudaMalloc(&more, 16), cudaErrorMemoryAllocation);
  EXPECT_EQ(failed_call(), "cudaMalloc");
  works(cudaMalloc(&more, 16));
  fail_call("any", 1);
  EXPECT_EQ(cudaFree(more), cudaErrorMemoryAllocation);
  EXPECT_EQ(failed_call(), "cudaFree");
  fail_call("cudaLaunchKernelExC", 1);
  EXPECT_THROW(launch_kernel(set, {1, 1}, static_cast<int*>(memory), 1), BackendError);
  works(cudaFree(more));
  works(cudaFree(memory));
  EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "who throws takes it along";
}

}  // namespace
}  // namespace longspan::simulated
