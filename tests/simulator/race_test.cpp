// What ThreadSanitizer learns about the machine (race_detector.hpp): small kernels of one barrier,
// wait or fence each, and the same without it, which is a race in any schedule. Only in builds for
// ThreadSanitizer.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "kernels/cuda/arch/shared.cuh"
#include "kernels/cuda/arch/sm80.cuh"
#include "kernels/cuda/arch/sm90.cuh"
#include "kernels/cuda/arch/tma.cuh"
#include "kernels/cuda/common/launch.hpp"
#include "kernels/simulated/machine.hpp"
#include "kernels/simulated/thread.hpp"

namespace longspan::simulated {
namespace {

using kernels::cuda::launch_kernel;
namespace arch = kernels::cuda::arch;

#ifdef __SANITIZE_THREAD__
constexpr bool kDetects = true;
#else
constexpr bool kDetects = false;
#endif

constexpr int kBytes = 512;  // 16 of each lane

/// Lanes write, and read their neighbours' values.
template <bool kRight>
__global__ void lanes_kernel(const int*, int* out) {
  int* const stage = reinterpret_cast<int*>(arch::dynamic_shared<128>());
  stage[threadIdx.x] = 1;
  if constexpr (kRight) __syncwarp();
  out[threadIdx.x] = stage[threadIdx.x ^ 1];
}

/// A shuffle orders no memory.
__global__ void shuffle_kernel(const int*, int* out) {
  int* const stage = reinterpret_cast<int*>(arch::dynamic_shared<128>());
  stage[threadIdx.x] = 1;
  const int other = __shfl_xor_sync(~0u, static_cast<int>(threadIdx.x), 1);
  out[threadIdx.x] = stage[other];
}

/// Each lane reads its own copy.
template <bool kRight>
__global__ void copy_kernel(const int* in, int* out) {
  int* const stage = reinterpret_cast<int*>(arch::dynamic_shared<128>());
  arch::copy_async(arch::shared_address(stage + 4 * threadIdx.x), in + 4 * threadIdx.x, true);
  arch::commit_copies();
  if constexpr (kRight) arch::wait_copies<0>();
  out[threadIdx.x] = stage[4 * threadIdx.x];
}

/// TMA copies what the warp has just stored, by ordinary stores.
template <bool kRight>
__global__ void publish_kernel(const int*, int* out) {
  std::byte* const stage = arch::dynamic_shared<128>();
  auto& barrier = *reinterpret_cast<arch::Barrier*>(stage + kBytes);
  if (threadIdx.x == 0) barrier.init(1);
  for (int i = 0; i < 4; ++i) out[4 * threadIdx.x + i] = 5;
  if constexpr (kRight) arch::publish_to_tma();
  __syncwarp();
  if (threadIdx.x == 0) {
    barrier.arrive_expecting(kBytes);
    copy_by_engine(
        arch::shared_address(stage), kBytes, &barrier,
        [=] {
          engine_reads(out, kBytes);
          engine_writes(stage, kBytes);
          std::memcpy(stage, out, kBytes);
        },
        Site::current());
  }
  __syncwarp();
  barrier.wait(0);
}

/// A lane reads what TMA copied.
template <bool kRight>
__global__ void engine_kernel(const int* in, int* out) {
  std::byte* const stage = arch::dynamic_shared<128>();
  auto& barrier = *reinterpret_cast<arch::Barrier*>(stage + kBytes);
  if (threadIdx.x == 0) {
    barrier.init(1);
    barrier.arrive_expecting(kBytes);
    copy_by_engine(
        arch::shared_address(stage), kBytes, &barrier,
        [=] {
          engine_reads(in, kBytes);
          engine_writes(stage, kBytes);
          std::memcpy(stage, in, kBytes);
        },
        Site::current());
  }
  __syncwarp();
  if constexpr (kRight) barrier.wait(0);
  out[threadIdx.x] = reinterpret_cast<int*>(stage)[threadIdx.x];
  barrier.wait(0);
}

class Races : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!kDetects) GTEST_SKIP() << "only ThreadSanitizer sees races: the preset simulated-tsan";
    GTEST_FLAG_SET(death_test_style, "threadsafe");  // a fork would not take its threads along
  }
  void TearDown() override { GTEST_FLAG_SET(death_test_style, "fast"); }

  static void run(void (*kernel)(const int*, int*)) {
    int *in = nullptr, *out = nullptr;
    ASSERT_EQ(cudaMalloc(reinterpret_cast<void**>(&in), kBytes), cudaSuccess);
    ASSERT_EQ(cudaMalloc(reinterpret_cast<void**>(&out), kBytes), cudaSuccess);
    launch_kernel(kernel, {1, 32, nullptr, kBytes + 64}, in, out);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    cudaFree(in);
    cudaFree(out);
  }
};
using RacesDeathTest = Races;

constexpr const char* kRace = "data race.*race_test.cpp:[0-9]+";

TEST_F(RacesDeathTest, BetweenLanes) {
  run(lanes_kernel<true>);
  EXPECT_DEATH(run(lanes_kernel<false>), kRace);
  EXPECT_DEATH(run(shuffle_kernel), kRace);
}
TEST_F(RacesDeathTest, WithCopies) {
  run(copy_kernel<true>);
  EXPECT_DEATH(run(copy_kernel<false>), kRace);
  run(engine_kernel<true>);
  EXPECT_DEATH(run(engine_kernel<false>), kRace);
}
TEST_F(RacesDeathTest, WithTheCopyEngineWithoutAProxyFence) {
  if (arch::kTarget < 900) GTEST_SKIP() << "a proxy fence is an instruction of sm_90";
  run(publish_kernel<true>);
  EXPECT_DEATH(run(publish_kernel<false>), kRace);
}

}  // namespace
}  // namespace longspan::simulated
