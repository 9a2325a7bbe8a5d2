// The simulator itself: what it allows, what it finds, and that a seed decides everything. Kernels
// here are small and wrong on purpose; each is named after its error.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "kernels/cuda/arch/overlap.cuh"
#include "kernels/cuda/arch/peer.cuh"
#include "kernels/cuda/arch/shared.cuh"
#include "kernels/cuda/arch/sm80.cuh"
#include "kernels/cuda/arch/sm90.cuh"
#include "kernels/cuda/arch/store_same.cuh"
#include "kernels/cuda/arch/tma.cuh"
#include "kernels/cuda/common/launch.hpp"
#include "kernels/simulated/machine.hpp"
#include "kernels/simulated/thread.hpp"

namespace longspan::simulated {
namespace {

using kernels::cuda::launch_kernel;
using kernels::cuda::LaunchConfig;
namespace arch = kernels::cuda::arch;
namespace sm90 = kernels::sm90;

#ifdef __SANITIZE_ADDRESS__
constexpr bool kChecksAddresses = true;
#else
constexpr bool kChecksAddresses = false;
#endif

// A report of misuse names this file, and a line.
#define HERE ".*at [^ ]*machine_test.cpp:[0-9]+"

/// Numbers in the memory of a GPU.
class Numbers {
 public:
  explicit Numbers(std::size_t count) : count_(count) {
    EXPECT_EQ(cudaMalloc(reinterpret_cast<void**>(&data_), count * sizeof(int)), cudaSuccess);
    EXPECT_EQ(cudaMemset(data_, 0, count * sizeof(int)), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);  // a stream may not wait for the default one
  }
  ~Numbers() { cudaFree(data_); }
  int* data() const { return data_; }
  std::vector<int> read() const {
    std::vector<int> all(count_);
    EXPECT_EQ(cudaMemcpy(all.data(), data_, count_ * sizeof(int), cudaMemcpyDefault), cudaSuccess);
    return all;
  }

 private:
  std::size_t count_;
  int* data_ = nullptr;
};

template <class... P>
void run(void (*kernel)(P...), const LaunchConfig& how, const std::type_identity_t<P>&... p) {
  launch_kernel(kernel, how, p...);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

/// The number of schedules, out of this many, in which `wrong` is true.
template <class Wrong>
int found_in(int schedules, const Wrong& wrong) {
  const std::uint64_t own = schedule_seed();
  int found = 0;
  for (int i = 0; i < schedules; ++i) {
    begin_schedule(own + 1000 + static_cast<std::uint64_t>(i));
    found += wrong();
  }
  begin_schedule(own);
  return found;
}

/// Under one schedule after the other, some of which let copies land late: for death tests.
template <class... P>
void run_often(void (*kernel)(P...), const LaunchConfig& how, const std::type_identity_t<P>&... p) {
  for (std::uint64_t seed = 2; seed < 30; ++seed) {
    begin_schedule(seed);
    run(kernel, how, p...);
  }
}

// ---- warps -------------------------------------------------------------------------------------

/// Every lane gets its left neighbour's number by shared memory.
template <bool kMeets>
__global__ void neighbour_kernel(int* out) {
  int(&numbers)[32] = arch::shared_variable<int[32]>();
  const int lane = static_cast<int>(threadIdx.x);
  numbers[lane] = lane;
  __syncwarp();
  const int left = numbers[(lane + 31) % 32];
  if constexpr (kMeets) __syncwarp();
  numbers[lane] = 100 + left;  // a lane that reads 100 or more was too late
  out[lane] = left;
}
template <bool kMeets>
bool is_wrong_neighbour() {
  Numbers out(32);
  run(neighbour_kernel<kMeets>, {1, 32}, out.data());
  for (int lane = 0; lane < 32; ++lane)
    if (out.read()[static_cast<std::size_t>(lane)] != (lane + 31) % 32) return true;
  return false;
}
TEST(Warp, ReadsBeforeItOverwritesOnlyBehindASyncwarp) {
  EXPECT_GT(found_in(20, is_wrong_neighbour<false>), 5);
  EXPECT_EQ(found_in(20, is_wrong_neighbour<true>), 0);
}

__global__ void sums_kernel(int* out) {
  int sum = static_cast<int>(threadIdx.x);
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  const int half = threadIdx.x < 16 ? __shfl_sync(0xffff, static_cast<int>(threadIdx.x), 3) : 0;
  out[threadIdx.x] = sum + 1000 * half;
}
TEST(Warp, ShufflesOfAllLanesAndOfSome) {
  Numbers out(32);
  run(sums_kernel, {1, 32}, out.data());
  for (int lane = 0; lane < 32; ++lane)
    EXPECT_EQ(out.read()[static_cast<std::size_t>(lane)], 496 + (lane < 16 ? 3000 : 0));
}

__global__ void apart_kernel(int* out) {
  if (threadIdx.x == 3)
    out[0] = __shfl_sync(~0u, 1, 0);
  else
    out[0] = __any_sync(~0u, 1);
}
__global__ void outside_kernel(int* out) {
  if (threadIdx.x < 8) out[threadIdx.x] = __shfl_sync(0xffu, 1, 9);
}
__global__ void left_out_kernel(int* out) { out[threadIdx.x] = __shfl_sync(0xffu, 1, 0); }
TEST(WarpDeathTest, LanesAtDifferentInstructions) {
  Numbers out(32);
  EXPECT_DEATH(run(apart_kernel, {1, 32}, out.data()), "lanes of a warp are at .*" HERE);
  EXPECT_DEATH(run(outside_kernel, {1, 32}, out.data()), "which takes no part" HERE);
  EXPECT_DEATH(run(left_out_kernel, {1, 32}, out.data()), "mask leaves out" HERE);
}

// ---- blocks ------------------------------------------------------------------------------------

template <bool kMeets>
__global__ void turn_kernel(int* out) {
  int* numbers = reinterpret_cast<int*>(arch::dynamic_shared<16>());
  numbers[threadIdx.x] = static_cast<int>(threadIdx.x);
  if constexpr (kMeets) __syncthreads();
  out[threadIdx.x] = numbers[blockDim.x - 1 - threadIdx.x];
}
template <bool kMeets>
bool is_wrong_turn() {
  Numbers out(128);
  run(turn_kernel<kMeets>, {1, 128, nullptr, 512}, out.data());
  for (int i = 0; i < 128; ++i)
    if (out.read()[static_cast<std::size_t>(i)] != 127 - i) return true;
  return false;
}
TEST(Block, SeesWhatOthersWroteOnlyBehindABarrier) {
  EXPECT_EQ(found_in(20, is_wrong_turn<false>), 20);
  EXPECT_EQ(found_in(20, is_wrong_turn<true>), 0);
}

__global__ void stuck_kernel(int* out) {
  if (threadIdx.x >= 32) arch::named_sync(1, 96);
  out[threadIdx.x] = 1;
}
__global__ void counts_kernel(int* out) {
  arch::named_sync(1, threadIdx.x < 32 ? 64 : 96);
  out[threadIdx.x] = 1;
}
TEST(BlockDeathTest, DeadlocksNameWhereWarpsStand) {
  Numbers out(96);
  EXPECT_DEATH(run(stuck_kernel, {1, 96}, out.data()), "nothing can go on.*warp 2: bar.sync" HERE);
  EXPECT_DEATH(run(counts_kernel, {1, 96}, out.data()), "others came for" HERE);
}

__global__ void beyond_kernel(int* out) {
  const std::uint32_t at = arch::shared_address(arch::dynamic_shared<16>());
  arch::store_shared(at + 512, 1u);
  out[0] = 1;
}
__global__ void plainly_beyond_kernel(int* out) {
  out[0] = reinterpret_cast<const int*>(arch::dynamic_shared<16>())[128];
}
TEST(BlockDeathTest, SharedMemoryHasABound) {
  Numbers out(1);
  EXPECT_DEATH(run(beyond_kernel, {1, 32, nullptr, 512}, out.data()), "out of bounds" HERE);
  if (kChecksAddresses)
    EXPECT_DEATH(run(plainly_beyond_kernel, {1, 32, nullptr, 512}, out.data()),
                 "use-after-poison.*machine_test.cpp:[0-9]+");
}

__global__ void never_set_kernel(const std::uint32_t* word, int* out) {
  while (arch::load_relaxed(word) == 0) {
  }
  out[0] = 1;
}
__global__ void never_added_kernel(int* out) {
  while (atomicAdd(out, 0) == 0) {
  }
}
__global__ void never_yields_kernel(const volatile int* word) {
  __syncthreads();
  while (*word == 0) {
  }
}
TEST(BlockDeathTest, LoopsThatNeverEnd) {
  Numbers word(1), out(1);
  EXPECT_DEATH(run(never_set_kernel, {1, 64}, reinterpret_cast<const std::uint32_t*>(word.data()),
                   out.data()),
               "nothing that they could wait for.*warp 1: a loop that waits" HERE);
  EXPECT_DEATH(run_often(never_added_kernel, {1, 32}, out.data()),
               "nothing that they could wait for.*warp 0: a turn given to others" HERE);
}
/// A program that has begun kernels keeps its patience, so that the test begins anew.
TEST(BlockDeathTest, LoopsWithoutAnInstructionAtWhichOthersGoOn) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  ASSERT_EQ(setenv("LONGSPAN_SIMULATED_PATIENCE_S", "1", 1), 0);
  Numbers word(1);
  EXPECT_DEATH(run(never_yields_kernel, {1, 32}, word.data()),
               "has run for 1 s without.*warp 0: __syncthreads" HERE);
  unsetenv("LONGSPAN_SIMULATED_PATIENCE_S");
  GTEST_FLAG_SET(death_test_style, "fast");
}

// ---- copies ------------------------------------------------------------------------------------

template <bool kWaits>
__global__ void copy_kernel(int* out, const int* in) {
  int* numbers = reinterpret_cast<int*>(arch::dynamic_shared<16>());
  const int i = static_cast<int>(threadIdx.x);
  arch::copy_async(arch::shared_address(numbers + 4 * i), in + 4 * i, true);
  arch::commit_copies();
  if constexpr (kWaits) arch::wait_copies<0>();
  for (int k = 0; k < 4; ++k) out[4 * i + k] = numbers[4 * i + k];
}
template <bool kWaits>
bool is_wrong_copy() {
  Numbers in(128), out(128);
  run(copy_kernel<kWaits>, {1, 32, nullptr, 512}, out.data(), in.data());
  return out.read() != in.read();
}
TEST(Copies, AreReadBehindTheirWaitOnly) {
  if (!kChecksAddresses)  // which ends the process
    EXPECT_GT(found_in(20, is_wrong_copy<false>), 10);
  EXPECT_EQ(found_in(20, is_wrong_copy<true>), 0);
}

/// Instructions detect what has not landed; loads by a pointer get NaN, and AddressSanitizer
/// reports.
__global__ void early_matrix_kernel(int* out, const int* in) {
  int* const numbers = reinterpret_cast<int*>(arch::dynamic_shared<16>());
  const std::uint32_t row = arch::shared_address(numbers + 4 * threadIdx.x);
  arch::copy_async(row, in + 4 * threadIdx.x, true);
  std::uint32_t matrices[4];
  arch::load_matrices(matrices, row);
  out[threadIdx.x] = static_cast<int>(matrices[0]);
}
__global__ void early_store_kernel(int*, const int* in) {
  int* const numbers = reinterpret_cast<int*>(arch::dynamic_shared<16>());
  const std::uint32_t row = arch::shared_address(numbers + 4 * threadIdx.x);
  arch::copy_async(row, in + 4 * threadIdx.x, true);
  arch::store_shared(row + 8, 1u);
}
__global__ void twice_kernel(int*, const int* in) {
  int* const numbers = reinterpret_cast<int*>(arch::dynamic_shared<16>());
  const std::uint32_t row = arch::shared_address(numbers + 4 * threadIdx.x);
  arch::copy_async(row, in + 4 * threadIdx.x, true);
  arch::copy_async(row, in, true);
}
__global__ void oblique_kernel(int*, const int* in) {
  arch::copy_async(arch::shared_address(arch::dynamic_shared<16>()), in + 1, true);
}
TEST(CopiesDeathTest, OfWhichSomebodyIsTooEarly) {
  Numbers in(132), out(128);
  const LaunchConfig how{1, 32, nullptr, 512};
  EXPECT_DEATH(run_often(early_matrix_kernel, how, out.data(), in.data()),
               "ldmatrix: .*a copy has not landed" HERE);
  EXPECT_DEATH(run_often(early_store_kernel, how, out.data(), in.data()),
               "st.shared: .*a copy has not landed" HERE);
  EXPECT_DEATH(run_often(twice_kernel, how, out.data(), in.data()),
               "cp.async: .*a copy has not landed" HERE);
  EXPECT_DEATH(run(oblique_kernel, how, out.data(), in.data()), "not a multiple of its size" HERE);
  if (kChecksAddresses)
    EXPECT_DEATH(run_often(copy_kernel<false>, how, out.data(), in.data()),
                 "use-after-poison.*machine_test.cpp:[0-9]+");
}

/// TMA copies what the warp has just stored.
template <bool kFences>
__global__ void publish_kernel(int* out, int* numbers) {
  int* const stage = reinterpret_cast<int*>(arch::dynamic_shared<128>());
  auto& barrier = *reinterpret_cast<arch::Barrier*>(stage + 32);
  if (threadIdx.x == 0) barrier.init(1);
  arch::store_same(numbers[threadIdx.x], 5);
  if constexpr (kFences) arch::publish_to_tma();
  __syncwarp();
  if (threadIdx.x == 0) {
    barrier.arrive_expecting(128);
    copy_by_engine(
        arch::shared_address(stage), 128, &barrier,
        [=] {
          engine_reads(numbers, 128);
          std::copy_n(numbers, 32, stage);
        },
        Site::current());
  }
  __syncwarp();
  barrier.wait(0);
  out[threadIdx.x] = stage[threadIdx.x];
}
TEST(CopiesDeathTest, OfWhatIsNotFenced) {
  Numbers numbers(32), out(32);
  run(publish_kernel<true>, {1, 32, nullptr, 256}, out.data(), numbers.data());
  EXPECT_EQ(out.read(), std::vector<int>(32, 5));
  if (arch::kTarget >= 900)
    EXPECT_DEATH(run(publish_kernel<false>, {1, 32, nullptr, 256}, out.data(), numbers.data()),
                 "its own warp has stored, and not fenced" HERE);
}

/// A block ends before its TMA copy has landed.
__global__ void leaves_kernel(int* numbers) {
  int* const stage = reinterpret_cast<int*>(arch::dynamic_shared<128>());
  auto& barrier = *reinterpret_cast<arch::Barrier*>(stage + 32);
  if (threadIdx.x != 0) return;
  barrier.init(1);
  barrier.arrive_expecting(128);
  copy_by_engine(
      arch::shared_address(stage), 128, &barrier, [=] { std::copy_n(numbers, 32, stage); },
      Site::current());
}
TEST(CopiesDeathTest, ThatNobodyWaitsFor) {
  Numbers numbers(32);
  EXPECT_DEATH(run_often(leaves_kernel, {1, 32, nullptr, 256}, numbers.data()),
               "ended while TMA was writing" HERE);
}

// ---- products ----------------------------------------------------------------------------------

enum class Wrong { nothing, no_fence, operand_under_way, read_too_early };

/// d = a b of ones, with a copied by TMA.
template <Wrong kWrong>
__global__ void product_kernel(int* out, const int* ones) {
  constexpr int kBytes = 64 * 128;
  std::byte* const a = arch::dynamic_shared<1024>();
  std::byte* const b = a + kBytes;
  auto& barrier = *reinterpret_cast<arch::Barrier*>(b + kBytes);
  if (threadIdx.x == 0) {
    barrier.init(1);
    barrier.arrive_expecting(kBytes);
    const Site site = Site::current();
    copy_by_engine(
        arch::shared_address(a), kBytes, &barrier,
        [=] {
          engine_reads(ones, kBytes);
          engine_writes(a, kBytes);
          std::memcpy(a, ones, kBytes);
        },
        site);
  }
  for (int i = static_cast<int>(threadIdx.x); i < kBytes / 4; i += 128)
    reinterpret_cast<int*>(b)[i] = 0x3f803f80;  // 1 and 1 of bf16
  sm90::fence_shared_stores();
  __syncthreads();
  if constexpr (kWrong != Wrong::operand_under_way) barrier.wait(0);
  float d[32] = {};
  if constexpr (kWrong != Wrong::no_fence) sm90::wgmma_begin();
  sm90::Product<64>::shared<__nv_bfloat16, false>(d, sm90::operand(a, 1024), sm90::operand(b, 1024),
                                                  false);
  sm90::wgmma_commit();
  if constexpr (kWrong == Wrong::read_too_early) out[threadIdx.x] = static_cast<int>(d[0]);
  sm90::wgmma_wait<0>();
  if constexpr (kWrong == Wrong::operand_under_way) barrier.wait(0);
  if constexpr (kWrong != Wrong::read_too_early) out[threadIdx.x] = static_cast<int>(d[0]);
}
template <Wrong kWrong>
bool is_wrong_product() {
  Numbers ones(64 * 32), out(128);
  const std::vector<int> numbers(64 * 32, 0x3f803f80);
  cudaMemcpy(ones.data(), numbers.data(), numbers.size() * sizeof(int), cudaMemcpyDefault);
  cudaFuncSetAttribute(product_kernel<kWrong>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                       64 << 10);
  run(product_kernel<kWrong>, {1, 128, nullptr, 2 * 64 * 128 + 64}, out.data(), ones.data());
  return out.read() != std::vector<int>(128, 16);
}
TEST(Products, AreReadBehindTheirWaitOnly) {
  if (!arch::kHasWgmma) GTEST_SKIP() << "wgmma is an instruction of sm_90";
  EXPECT_EQ(found_in(20, is_wrong_product<Wrong::nothing>), 0);
  if (!kChecksAddresses) EXPECT_GT(found_in(20, is_wrong_product<Wrong::read_too_early>), 5);
}
TEST(ProductsDeathTest, Misuse) {
  if (!arch::kHasWgmma) GTEST_SKIP() << "wgmma is an instruction of sm_90";
  EXPECT_DEATH(is_wrong_product<Wrong::no_fence>(), "wgmma without wgmma.fence" HERE);
  EXPECT_DEATH(found_in(20, is_wrong_product<Wrong::operand_under_way>),
               "reads shared memory into which a copy has not landed" HERE);
  if (kChecksAddresses)
    EXPECT_DEATH(found_in(20, is_wrong_product<Wrong::read_too_early>),
                 "use-after-poison.*machine_test.cpp:[0-9]+");
}

/// A producer warp and a consumer, a stage each way.
template <bool kWaitsForRoom>
__global__ void ring_kernel(int* out, const int* in, int rounds) {
  int* stage = reinterpret_cast<int*>(arch::dynamic_shared<128>());
  auto* barriers = reinterpret_cast<arch::Barrier*>(stage + 128);
  if (threadIdx.x == 0) {
    barriers[0].init(32);  // full: an arrival of each lane, behind its copies
    barriers[1].init(32);  // empty
  }
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int round = 0; round < rounds; ++round) {
    const std::uint32_t parity = static_cast<std::uint32_t>(round) & 1;
    if (threadIdx.x < 32) {
      if constexpr (kWaitsForRoom) barriers[1].wait(parity ^ 1);
      arch::copy_async(arch::shared_address(stage + 4 * lane), in + 128 * round + 4 * lane, true);
      arch::expect_copies(barriers[0]);
      barriers[0].arrive();
    } else {
      barriers[0].wait(parity);
      const int other = 4 * ((lane + 1) % 32);
      for (int k = 0; k < 4; ++k) out[128 * round + other + k] = stage[other + k];
      barriers[1].arrive();
    }
  }
}
template <bool kWaitsForRoom>
bool is_wrong_ring() {
  constexpr int kRounds = 6;
  Numbers in(128 * kRounds), out(128 * kRounds);
  std::vector<int> numbers(128 * kRounds);
  for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<int>(i);
  cudaMemcpy(in.data(), numbers.data(), numbers.size() * sizeof(int), cudaMemcpyDefault);
  run(ring_kernel<kWaitsForRoom>, {1, 64, nullptr, 1024}, out.data(), in.data(), kRounds);
  return out.read() != numbers;
}
TEST(MBarrier, HandsStagesToAndFro) { EXPECT_EQ(found_in(40, is_wrong_ring<true>), 0); }

__global__ void too_many_kernel(int* out) {
  arch::Barrier& barrier = arch::shared_variable<arch::Barrier>();
  if (threadIdx.x == 0) barrier.init(2);
  __syncthreads();
  if (threadIdx.x == 0) barrier.arrive_expecting(64);  // bytes that nothing copies
  barrier.arrive();
  out[0] = 1;
}
__global__ void fresh_kernel(int* out) {
  arch::Barrier& barrier = arch::shared_variable<arch::Barrier>();
  barrier.arrive();
  out[0] = 1;
}
__global__ void overwritten_kernel(int* out) {
  arch::Barrier& barrier = arch::shared_variable<arch::Barrier>();
  if (threadIdx.x == 0) barrier.init(32);
  __syncwarp();
  if (threadIdx.x == 0) reinterpret_cast<int&>(barrier) = 3;
  __syncwarp();
  barrier.arrive();
  out[0] = 1;
}
TEST(MBarrierDeathTest, Misuse) {
  Numbers out(1);
  EXPECT_DEATH(run(too_many_kernel, {1, 32}, out.data()), "more arrivals at an mbarrier" HERE);
  EXPECT_DEATH(run(fresh_kernel, {1, 32}, out.data()), "not initialised" HERE);
  EXPECT_DEATH(run(overwritten_kernel, {1, 32}, out.data()), "has overwritten" HERE);
}

// ---- kernels -----------------------------------------------------------------------------------

__global__ void first_kernel(int* data) {
  arch::let_next_kernel_start();
  for (int i = 0; i < 50; ++i) __syncthreads();
  data[threadIdx.x] = 7;
}
template <bool kWaits>
__global__ void second_kernel(int* out, const int* data) {
  if constexpr (kWaits) arch::wait_for_kernels_before();
  out[threadIdx.x] = data[threadIdx.x];
}
template <bool kWaits>
bool is_wrong_overlap() {
  Numbers data(64), out(64);
  LaunchConfig how{1, 64};
  cudaStream_t stream;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  how.stream = stream;
  launch_kernel(first_kernel, how, data.data());
  how.overlaps = true;
  launch_kernel(second_kernel<kWaits>, how, out.data(), data.data());
  cudaStreamSynchronize(stream);
  cudaStreamDestroy(stream);
  return out.read() != std::vector<int>(64, 7);
}
TEST(Kernels, OverlapAndWaitForEachOther) {
  const int found = found_in(20, is_wrong_overlap<false>);
  if (arch::kTarget >= 900)
    EXPECT_GT(found, 5);
  else  // where kernels begin when the one before has ended
    EXPECT_EQ(found, 0);
  EXPECT_EQ(found_in(20, is_wrong_overlap<true>), 0);
}

__global__ void order_kernel(int* out) {
  const int turn = atomicAdd(out, 1);
  out[1 + turn] = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
}
TEST(Schedules, ASeedSaysAll) {
  const auto order = [](std::uint64_t seed) {
    begin_schedule(seed);
    Numbers out(1 + 4 * 64);
    run(order_kernel, {4, 64}, out.data());
    return out.read();
  };
  const std::uint64_t own = schedule_seed();
  for (std::uint64_t seed = 2; seed < 12; ++seed) EXPECT_EQ(order(seed), order(seed));
  int different = 0;
  for (std::uint64_t seed = 2; seed < 12; ++seed) different += order(seed) != order(seed + 1);
  EXPECT_GT(different, 4);
  begin_schedule(own);
}

}  // namespace
}  // namespace longspan::simulated
