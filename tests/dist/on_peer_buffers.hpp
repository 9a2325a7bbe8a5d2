// The start of tests of the exchange between GPUs: ranks, a stream, peer buffers, replays of a
// graph.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/nccl/peer_buffers.hpp"
#include "comm/transport.hpp"
#include "kernels/backend.hpp"
#include "kernels/cuda/exchange/exchange.hpp"
#include "launcher/bench/graph.hpp"
#include "tests/dist/world.hpp"

namespace longspan::tests {

inline void ok(cudaError_t status) { ASSERT_EQ(status, cudaSuccess) << cudaGetErrorString(status); }

/// One replay, until it is done; the time that the GPU took, in us.
inline double replay(launcher::Graph& graph) {
  graph.replay(1);
  return graph.milliseconds().at(0) * 1000;
}

/// Of replays, in us, on the slowest rank.
struct Time {
  double median, most;
};

class OnPeerBuffers : public ::testing::Test {
 protected:
  void SetUp() override {
    world_.emplace(test_world());
    if (world_->size() < 2) GTEST_SKIP() << "one rank has nobody to exchange with";
    ok(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    backend_ = kernels::cuda_backend();
  }
  void TearDown() override {
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }

  /// Null, with the reason on standard output, where these GPUs have no peer buffers.
  std::unique_ptr<comm::PeerBuffers> open(const Communicator& world, std::int64_t rows, int dim) {
    std::string why;
    auto peer_buffers = comm::PeerBuffers::open(
        comm::transport_of(world), kernels::cuda::peer_buffer_bytes(rows, dim, world.size()), why);
    if (!peer_buffers) std::printf("no peer buffers: %s\n", why.c_str());
    return peer_buffers;
  }

  /// work(stream), one of 20 in a graph whose replays all ranks begin together.
  template <class Work>
  Time time_of(const Work& work) {
    constexpr int kChain = 20;
    const auto chain = [&](Stream on) {
      for (int i = 0; i < kChain; ++i) work(on);
    };
    chain(Stream{stream_});
    cudaStreamSynchronize(stream_);
    launcher::Graph graph(stream_, chain);
    std::vector<double> times;
    for (int i = 0; i < 40; ++i) {
      world_->gather("", "next replay");
      const double us = replay(graph) / kChain;
      if (i >= 5) times.push_back(us);
    }
    std::sort(times.begin(), times.end());
    const auto slowest = [&](double one) {
      double worst = 0;
      for (const std::string& text : world_->gather(std::to_string(one), "time"))
        worst = std::max(worst, std::stod(text));
      return worst;
    };
    return {slowest(times[times.size() / 2]), slowest(times.back())};
  }

  std::optional<Communicator> world_;
  std::unique_ptr<kernels::Backend> backend_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace longspan::tests
