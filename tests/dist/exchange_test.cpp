// The exchange through peer buffers, one GPU a rank: the same bits as merging all ranks' states on
// one GPU, for every variant; replays, a soak with random delays, epochs that wrap, and the ends of
// waits. LONGSPAN_SOAK=1000000 makes the soak long; LONGSPAN_TIME=1 prints a table of times, and
// LONGSPAN_TIME=blocks the same for several numbers of blocks.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "kernels/backend.hpp"
#include "kernels/cuda/exchange/exchange.hpp"
#include "launcher/bench/graph.hpp"
#include "launcher/judge/nans.hpp"
#include "longspan/buffer.hpp"
#include "tests/dist/on_peer_buffers.hpp"
#include "tests/support/fresh_seed.hpp"
#include "tests/support/message.hpp"
#include "tests/support/simulated.hpp"

namespace longspan::tests {
namespace {

using kernels::ExchangeParams;
using kernels::Push;
using kernels::StateSlots;

constexpr Push kVariants[] = {Push::one_trip, Push::two_trips};

using launcher::Graph;

struct Case {
  std::int64_t rows = 32;
  int heads = 1;
  int dim = 128;
  DType dtype = DType::bf16;
  bool interleaved = false;
  bool sinks = false;
};

/// The NaN of all ones: the one word that cannot be sent unchanged.
float nan_of_ones() {
  const std::uint32_t bits = ~std::uint32_t{0};
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

/// Every rank's states, the same on all ranks. One row in eight is empty and carries NaN, one in
/// sixteen has a NaN in it.
std::vector<std::byte> random_states(const Case& c, int ranks, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<std::byte> memory(StateSlots::bytes(c.rows, c.dim) * ranks);
  const StateSlots slots{memory.data(), c.rows, c.dim, ranks};
  for (int r = 0; r < ranks; ++r)
    for (std::int64_t row = 0; row < c.rows; ++row) {
      const bool empty = random() % 8 == 0;
      const float nothing = row % 2 == 0 ? std::numeric_limits<float>::quiet_NaN() : nan_of_ones();
      slots.stats(r)[row] = {5 * normal(random), empty ? 0.0f : 1 + std::abs(normal(random))};
      for (int d = 0; d < c.dim; ++d) slots.o(r, row)[d] = empty ? nothing : normal(random);
      if (random() % 16 == 0) slots.o(r, row)[random() % c.dim] = nan_of_ones();
    }
  return memory;
}

class Exchange : public OnPeerBuffers {
 protected:
  static constexpr std::size_t kCanary = 256;

  /// One problem on this GPU: all states, the own slot by itself, and two results with canaries.
  struct Memory {
    Buffer whole, own, sinks, out, lse, expected_out, expected_lse;
    std::size_t slot_bytes, out_bytes, lse_bytes;
    DType dtype;
  };

  Memory memory_of(const Case& c, std::uint64_t seed) {
    const int ranks = world_->size(), rank = world_->rank();
    const auto states = random_states(c, ranks, seed);
    Memory m;
    m.slot_bytes = static_cast<std::size_t>(StateSlots::bytes(c.rows, c.dim));
    m.out_bytes = static_cast<std::size_t>(c.rows * c.dim) * size_of(c.dtype);
    m.lse_bytes = static_cast<std::size_t>(c.rows) * 4;
    m.dtype = c.dtype;
    auto poisoned = [](std::size_t bytes) {
      Buffer buffer(Device::cuda, bytes);
      const std::vector<unsigned char> poison(bytes, 0xA5);
      buffer.upload(poison.data());
      return buffer;
    };
    m.whole = Buffer(Device::cuda, states.size());
    m.whole.upload(states.data());
    std::vector<std::byte> alone(states.size(), std::byte{0xff});
    std::copy_n(states.begin() + rank * m.slot_bytes, m.slot_bytes,
                alone.begin() + rank * m.slot_bytes);
    m.own = Buffer(Device::cuda, alone.size());
    m.own.upload(alone.data());
    std::vector<float> sinks(c.heads);
    std::mt19937 random(static_cast<unsigned>(seed));
    for (float& sink : sinks) sink = std::normal_distribution<float>()(random);
    m.sinks = Buffer(Device::cuda, sinks.size() * 4);
    m.sinks.upload(sinks.data());
    m.out = poisoned(m.out_bytes + 2 * kCanary);
    m.lse = poisoned(m.lse_bytes + 2 * kCanary);
    m.expected_out = poisoned(m.out_bytes + 2 * kCanary);
    m.expected_lse = poisoned(m.lse_bytes + 2 * kCanary);
    return m;
  }

  kernels::MergeParams merge_of(const Case& c, const Memory& m, bool expected) {
    kernels::MergeParams p;
    p.states = {static_cast<std::byte*>((expected ? m.whole : m.own).data()), c.rows, c.dim,
                world_->size()};
    p.interleaved = c.interleaved;
    p.heads = c.heads;
    if (c.sinks) p.sinks = static_cast<const float*>(m.sinks.data());
    p.tokens = c.rows / c.heads;
    p.dtype = c.dtype;
    const auto inside = [](const Buffer& b) { return static_cast<std::byte*>(b.data()) + kCanary; };
    p.out = {inside(expected ? m.expected_out : m.out), std::int64_t{c.heads} * c.dim, c.dim};
    p.lse = {reinterpret_cast<float*>(inside(expected ? m.expected_lse : m.lse)), c.heads, 1};
    return p;
  }

  /// out and lse with their canaries, bit for bit.
  ::testing::AssertionResult same(const Memory& m) {
    const auto bytes = [](const Buffer& b, DType dtype) {
      std::vector<std::byte> copy(b.bytes());
      b.download(copy.data());
      launcher::unite_nans(copy, dtype);
      return copy;
    };
    if (bytes(m.out, m.dtype) != bytes(m.expected_out, m.dtype))
      return ::testing::AssertionFailure() << "out differs";
    if (bytes(m.lse, DType::fp32) != bytes(m.expected_lse, DType::fp32))
      return ::testing::AssertionFailure() << "lse differs";
    return ::testing::AssertionSuccess();
  }

  void check(const Case& c, Push push, int blocks, comm::PeerBuffers& peer_buffers,
             std::int64_t capacity, std::uint64_t seed) {
    const Memory m = memory_of(c, seed);
    backend_->merge(merge_of(c, m, true), Stream{stream_});
    kernels::cuda::exchange({peer_buffers.view(), merge_of(c, m, false), capacity,
                             static_cast<std::uint32_t>(seed), push, blocks},
                            stream_);
    ok(cudaStreamSynchronize(stream_));
    ASSERT_EQ(peer_buffers.report().kind, PeerReport::none)
        << "rank " << peer_buffers.report().rank;
    EXPECT_TRUE(same(m)) << name(push) << ", blocks " << blocks << ", rows " << c.rows << ", dim "
                         << c.dim << ", " << longspan::name(c.dtype)
                         << (c.interleaved ? ", interleaved" : "");
  }
};

TEST_F(Exchange, BitsOfTheMerge) {
  const std::uint64_t seed = shared_seed(*world_);
  std::uint64_t turn = 0;
  for (int dim : {16, 64, 96, 128, 256}) {
    constexpr std::int64_t kCapacity = 1100;
    auto peer_buffers = open(*world_, kCapacity, dim);
    ASSERT_TRUE(peer_buffers);
    for (std::int64_t rows : {1, 5, 32, 64, 250, 1024})
      for (Push push : kVariants)
        for (bool interleaved : {false, true}) {
          constexpr DType kTypes[] = {DType::bf16, DType::fp32, DType::fp16, DType::e4m3};
          ++turn;
          const int heads = rows % 2 == 0 ? 2 : 1;
          const int blocks = turn % 5 == 0 ? 3 : 0;  // 3: each of them takes rows several times
          check({rows, heads, dim, kTypes[turn % 4], interleaved, turn % 3 == 0}, push, blocks,
                *peer_buffers, kCapacity, seed + turn);
        }
  }
}

TEST_F(Exchange, ReplaysAdvanceTheEpoch) {
  const std::uint64_t seed = shared_seed(*world_);
  const Case c{64, 64, 128, DType::bf16, true, true};
  auto peer_buffers = open(*world_, c.rows, c.dim);
  ASSERT_TRUE(peer_buffers);
  for (Push push : kVariants) {
    const Memory m = memory_of(c, seed);
    Graph graph(stream_, [&](Stream) {
      kernels::cuda::exchange({peer_buffers->view(), merge_of(c, m, false), c.rows, 1, push},
                              stream_);
    });
    for (int turn = 0; turn < 40; ++turn) {
      const auto states = random_states(c, world_->size(), seed + 100 + turn);
      ok(cudaMemcpyAsync(m.whole.data(), states.data(), states.size(), cudaMemcpyHostToDevice,
                         stream_));
      const std::size_t at = world_->rank() * m.slot_bytes;
      ok(cudaMemcpyAsync(static_cast<std::byte*>(m.own.data()) + at, states.data() + at,
                         m.slot_bytes, cudaMemcpyHostToDevice, stream_));
      ok(cudaMemsetAsync(static_cast<std::byte*>(m.out.data()) + kCanary, 0xA5, m.out_bytes,
                         stream_));
      backend_->merge(merge_of(c, m, true), Stream{stream_});
      replay(graph);
      ASSERT_EQ(peer_buffers->report().kind, PeerReport::none);
      ASSERT_TRUE(same(m)) << name(push) << ", replay " << turn;
    }
  }
}

TEST_F(Exchange, SoakWithDelaysAndAnEpochThatWraps) {
  const char* asked = std::getenv("LONGSPAN_SOAK");
  const long epochs = asked ? std::atol(asked) : kSimulated ? 200 : 6000;
  constexpr int kBatch = kSimulated ? 20 : 100;
  const std::uint64_t seed = shared_seed(*world_);
  const Case c{64, 64, 128, DType::bf16, false, false};
  auto peer_buffers = open(*world_, c.rows, c.dim);
  ASSERT_TRUE(peer_buffers);
  // Just before the wrap, as if that many exchanges had been done.
  const std::uint32_t start = ~std::uint32_t{0} - static_cast<std::uint32_t>(epochs / 2);
  const PeerView view = peer_buffers->view();
  ok(cudaMemcpy(view.epoch, &start, 4, cudaMemcpyHostToDevice));
  world_->gather("", "start of the soak");

  const Memory m = memory_of(c, seed);
  backend_->merge(merge_of(c, m, true), Stream{stream_});
  Graph graph(stream_, [&](Stream) {
    for (int i = 0; i < kBatch; ++i)
      kernels::cuda::exchange(
          {view, merge_of(c, m, false), c.rows, 1, kVariants[i % std::size(kVariants)]}, stream_);
  });
  std::mt19937 random(fresh_seed());
  for (long done = 0; done < epochs; done += kBatch) {
    if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
    ok(cudaMemsetAsync(static_cast<std::byte*>(m.out.data()) + kCanary, 0xA5, m.out_bytes,
                       stream_));
    replay(graph);
    ASSERT_EQ(peer_buffers->report().kind, PeerReport::none) << "after " << done;
    if (random() % 8 == 0) {
      ASSERT_TRUE(same(m)) << "after " << done;
    }
  }
  EXPECT_TRUE(same(m));
}

/// A rank that is late once delays the others once: their wait must not make them late, and then
/// the first one, and so on. Without a producer, and with more rows than fit at once. The late rank
/// itself finds all words present, so that its time depends on no other host.
TEST_F(Exchange, ALateRankIsWaitedForOnce) {
  if (kSimulated) GTEST_SKIP() << "it judges times";
  constexpr int kChain = 20;
  const Case c{4096, 64, 128, DType::bf16, false, false};
  auto peer_buffers = open(*world_, c.rows, c.dim);
  ASSERT_TRUE(peer_buffers);
  const Memory m = memory_of(c, 1);
  for (Push push : kVariants)
    for (const bool overlap : {false, true}) {
      const ExchangeParams p{
          peer_buffers->view(), merge_of(c, m, false), c.rows, 1, push, 0, overlap};
      Graph graph(stream_, [&](Stream) {
        for (int i = 0; i < kChain; ++i) kernels::cuda::exchange(p, stream_);
      });
      double best = std::numeric_limits<double>::infinity();
      for (int turn = 0; turn < 6; ++turn) {
        world_->gather("", "next replay");
        if (world_->rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
        const double us = replay(graph);
        if (turn > 0) best = std::min(best, us);
      }
      ASSERT_EQ(peer_buffers->report().kind, PeerReport::none);
      if (world_->rank() == 0) {
        EXPECT_LT(best / kChain, 100) << "us an exchange, " << name(push);
      }
    }
}

TEST_F(Exchange, RanksThatMeanDifferentThingsAreReported) {
  for (Push push : kVariants) {
    const Case c{64, 64, 64, DType::bf16, false, false};
    auto peer_buffers = open(*world_, c.rows, c.dim);
    ASSERT_TRUE(peer_buffers);
    const Memory m = memory_of(c, 1);
    const std::uint32_t shape = world_->rank() == 0 ? 7 : 8;
    kernels::cuda::exchange({peer_buffers->view(), merge_of(c, m, false), c.rows, shape, push},
                            stream_);
    cudaStreamSynchronize(stream_);
    EXPECT_EQ(peer_buffers->report().kind, PeerReport::differs) << name(push);
    peer_buffers->abort();
  }
}

/// So many more rows that another variant takes them: neither side gets what it waits for, and both
/// report why.
TEST_F(Exchange, RanksThatTakeOtherVariantsAreReported) {
  const auto world =
      from_mpi(MPI_COMM_WORLD, {.device = Device::cuda, .deadline = std::chrono::seconds(4)});
  world.make_current();
  constexpr std::int64_t kFew = 64, kMany = 4096;
  constexpr int kDim = 64;
  ASSERT_NE(kernels::cuda::choose_push(kFew, kDim, world.size()),
            kernels::cuda::choose_push(kMany, kDim, world.size()));
  std::string why;
  auto peer_buffers = comm::PeerBuffers::open(
      comm::transport_of(world), kernels::cuda::peer_buffer_bytes(kMany, kDim, world.size()), why);
  ASSERT_TRUE(peer_buffers) << why;
  const Case c{world.rank() == 0 ? kFew : kMany, 64, kDim, DType::bf16, false, false};
  const Memory m = memory_of(c, 1);
  // A layer's digest of an exchange includes the number of rows.
  const auto hash = static_cast<std::uint64_t>(c.rows);
  kernels::cuda::exchange(
      {peer_buffers->view(), merge_of(c, m, false), kMany, hash, Push::automatic}, stream_);
  ok(cudaStreamSynchronize(stream_));
  EXPECT_EQ(peer_buffers->report().kind, PeerReport::differs);
  if (world.rank() != 0) {
    EXPECT_EQ(peer_buffers->report().rank, 0u);
  }
  world_->gather("", "end of the wait");
  peer_buffers->abort();
}

TEST_F(Exchange, ARankThatDoesNotComeEndsTheWait) {
  const auto world =
      from_mpi(MPI_COMM_WORLD, {.device = Device::cuda, .deadline = std::chrono::seconds(4)});
  world.make_current();
  for (Push push : kVariants) {
    const Case c{64, 64, 64, DType::bf16, false, false};
    std::string why;
    auto peer_buffers =
        comm::PeerBuffers::open(comm::transport_of(world),
                                kernels::cuda::peer_buffer_bytes(c.rows, c.dim, world.size()), why);
    ASSERT_TRUE(peer_buffers) << why;
    const Memory m = memory_of(c, 1);
    if (world.rank() != 1) {
      const auto begin = std::chrono::steady_clock::now();
      kernels::cuda::exchange({peer_buffers->view(), merge_of(c, m, false), c.rows, 1, push},
                              stream_);
      ok(cudaStreamSynchronize(stream_));
      EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(4));
      EXPECT_EQ(peer_buffers->report().kind, PeerReport::timeout) << name(push);
      EXPECT_EQ(peer_buffers->report().rank, 1u) << name(push);
    }
    world_->gather("", "end of the wait");
    peer_buffers->abort();
  }
}

/// Layers that end one rank after the other: memory is freed only after all have closed it.
TEST_F(Exchange, LayersThatEndLeaveNoMemory) {
  constexpr std::size_t kBuffer = std::size_t{64} << 20;
  const auto free_bytes = [] {
    std::size_t free = 0, total = 0;
    ok(cudaMemGetInfo(&free, &total));
    return free;
  };
  std::size_t before = 0;
  for (int turn = 0; turn < 12; ++turn) {
    std::string why;
    auto layer = comm::transport_of(*world_).open_peer_buffers(1, kBuffer, why);
    ASSERT_TRUE(layer) << why;
    if (turn == 2) before = free_bytes();
    const int first = turn % world_->size();
    if (world_->rank() == first) layer.reset();
    world_->gather("", "the others still have it mapped");
    if (!layer) continue;
    ok(cudaMemset(layer->peer_buffer[first] + kBuffer / 2, 0, 4096));
    ok(cudaDeviceSynchronize());
  }
  EXPECT_LE(before, free_bytes() + 2 * kBuffer);
}

/// Not a test of speed: a table for people, in a graph of 20, after a producer that writes the
/// state.
TEST_F(Exchange, Times) {
  if (std::getenv("LONGSPAN_TIME") == nullptr) GTEST_SKIP() << "LONGSPAN_TIME is not set";
  const std::string asked = std::getenv("LONGSPAN_TIME");
  for (const auto& [tokens, heads] :
       {std::pair{1, 32}, {1, 64}, {4, 64}, {16, 32}, {16, 64}, {64, 32}, {64, 64}}) {
    const Case c{std::int64_t{tokens} * heads, heads, 128, DType::bf16, false, false};
    auto peer_buffers = open(*world_, c.rows, c.dim);
    ASSERT_TRUE(peer_buffers);
    const Memory m = memory_of(c, 1);
    const std::size_t at = world_->rank() * m.slot_bytes;
    std::byte* own = static_cast<std::byte*>(m.own.data()) + at;
    const std::byte* from = static_cast<std::byte*>(m.whole.data()) + at;
    const auto time = [&](const auto& step) {
      return time_of([&](Stream on) {
        backend_->place_rows({from, own, nullptr, static_cast<std::int64_t>(m.slot_bytes / 16), 16},
                             on);
        step();
      });
    };
    const Time producer = time([] {});
    const Time nccl = time([&] {
      comm::transport_of(*world_).all_gather(own, m.own.data(), m.slot_bytes, Stream{stream_},
                                             "states");
      backend_->merge(merge_of(c, m, false), Stream{stream_});
    });
    if (world_->rank() == 0)
      std::printf("# %2d x %2d, %d ranks, us added to a producer of %.2f: NCCL %.2f\n", tokens,
                  heads, world_->size(), producer.median, nccl.median - producer.median);
    const std::vector<int> numbers =
        asked == "blocks" ? std::vector{0, 32, 64, 128, 256} : std::vector{0};
    for (Push push : kVariants)
      for (const int blocks : numbers) {
        const auto exchange = [&](bool overlap) {
          ExchangeParams p{
              peer_buffers->view(), merge_of(c, m, false), c.rows, 1, push, blocks, overlap};
          Time t = time([&] { kernels::cuda::exchange(p, stream_); });
          t.median -= producer.median, t.most -= producer.median;
          return t;
        };
        const Time over = exchange(true), after = exchange(false);
        if (world_->rank() != 0) continue;
        std::printf("#   %-9s %6.2f (at most %6.2f), after the producer %6.2f (%6.2f)", name(push),
                    over.median, over.most, after.median, after.most);
        if (blocks != 0) std::printf(", blocks %d", blocks);
        std::printf("\n");
      }
    EXPECT_EQ(peer_buffers->report().kind, PeerReport::none);
  }
}

}  // namespace
}  // namespace longspan::tests
