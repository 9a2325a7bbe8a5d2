// A communicator, a layer and the calls of one rank compute on their own GPU, whichever is current,
// and do not change the caller's choice.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "longspan/longspan.hpp"
#include "tests/support/random_elements.hpp"

namespace longspan {
namespace {

constexpr int kHeads = 2, kDim = 64, kKeys = 300;

int current() {
  int gpu = -1;
  EXPECT_EQ(cudaGetDevice(&gpu), cudaSuccess);
  return gpu;
}

struct Rows {
  Buffer memory;
  Tensor tensor;

  Rows(Device device, const std::vector<float>& values, std::int64_t rows)
      : memory(device, values.size() * sizeof(float)),
        tensor(static_cast<const float*>(memory.data()), {rows, kHeads, kDim}, device) {
    memory.upload(values.data());
  }
  std::vector<float> values() const {
    std::vector<float> found(memory.bytes() / sizeof(float));
    memory.download(found.data());
    return found;
  }
};

/// One row of decode by a layer on `world`, with tensors on the GPU that `place` makes current.
std::vector<float> attend_on(const Communicator& world, int place, int at_work) {
  const auto make = [&](std::size_t rows, std::uint32_t seed) {
    if (world.device() == Device::cuda) {
      EXPECT_EQ(cudaSetDevice(place), cudaSuccess);
    }
    Rows made(world.device(), tests::random_floats(rows * kHeads * kDim, seed),
              static_cast<std::int64_t>(rows));
    if (world.device() == Device::cuda) {
      EXPECT_EQ(cudaSetDevice(at_work), cudaSuccess);
    }
    return made;
  };
  const Rows q = make(1, 1), k = make(kKeys, 2), v = make(kKeys, 3), out = make(1, 4);
  Attention layer(world, {.heads = kHeads,
                          .kv_heads = kHeads,
                          .head_dim = kDim,
                          .dtypes = {.compute = fp32},
                          .threads = 1});
  layer.run({.q = q.tensor, .k = k.tensor, .v = v.tensor, .out = out.tensor, .total_keys = kKeys});
  layer.wait();
  return out.values();
}

TEST(Devices, ALayerComputesOnItsOwnGpu) {
  const int gpus = gpu_count();
  if (gpus < 2) GTEST_SKIP() << "needs two GPUs; there are " << gpus;
  const std::vector<float> expected = attend_on(self(), 0, 0);
  for (int gpu = 0; gpu < 2; ++gpu) {
    const int other = 1 - gpu;
    ASSERT_EQ(cudaSetDevice(other), cudaSuccess);
    const Communicator world = self(Device::cuda, gpu);
    EXPECT_EQ(world.gpu(), gpu);
    EXPECT_EQ(current(), other);
    const std::vector<float> found = attend_on(world, gpu, other);
    EXPECT_EQ(current(), other);
    ASSERT_EQ(found.size(), expected.size());
    for (std::size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], expected[i], 1e-5) << i;
    world.make_current();
    EXPECT_EQ(current(), gpu);
  }
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
}

TEST(Devices, CallsOfOneRankComputeOnTheirOwnGpu) {
  const int gpus = gpu_count();
  if (gpus < 2) GTEST_SKIP() << "needs two GPUs; there are " << gpus;
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  const Rows a(Device::cuda, tests::random_floats(kHeads * kDim, 5), 1),
      b(Device::cuda, tests::random_floats(kHeads * kDim, 6), 1),
      out(Device::cuda, std::vector<float>(kHeads * kDim, NAN), 1);
  Buffer lse(Device::cuda, kHeads * sizeof(float));
  lse.upload(std::vector<float>(kHeads, 0.0f).data());
  const Lse same =
      Lse::tokens_heads({static_cast<const float*>(lse.data()), {1, kHeads}, Device::cuda});
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  const ServingOps ops(Device::cuda, 0, 1);
  ops.merge_attn_states({.out = out.tensor,
                         .prefix_out = a.tensor,
                         .prefix_lse = same,
                         .suffix_out = b.tensor,
                         .suffix_lse = same},
                        LogBase::e);
  EXPECT_EQ(current(), 0);
  const std::vector<float> x = a.values(), y = b.values(), found = out.values();
  EXPECT_EQ(current(), 0);
  for (std::size_t i = 0; i < found.size(); ++i)
    EXPECT_NEAR(found[i], 0.5f * (x[i] + y[i]), 1e-6) << i;
}

TEST(Devices, AGpuThatThereIsNotIsRefusedByName) {
  const int gpus = gpu_count();
  if (gpus == 0) GTEST_SKIP() << "needs a GPU";
  for (const int gpu : {gpus, gpus + 7}) try {
      self(Device::cuda, gpu);
      ADD_FAILURE() << gpu << " was taken";
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find("GPU " + std::to_string(gpu)), std::string::npos)
          << error.what();
    }
  EXPECT_THROW(ServingOps(Device::cuda, 0, gpus), UsageError);
}

}  // namespace
}  // namespace longspan
