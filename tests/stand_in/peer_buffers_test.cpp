// Peer buffers between ranks that are threads, over a stand-in for CUDA's runtime: what each
// failing call of PeerBuffers::open leaves behind, the owner of memory, and when memory may be
// freed.
#include "comm/nccl/peer_buffers.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <latch>
#include <memory>
#include <string>
#include <vector>

#include "comm/control/wire.hpp"
#include "kernels/cuda/common/launch.hpp"
#include "longspan/error.hpp"
#include "tests/stand_in/gpus.hpp"
#include "tests/stand_in/ranks.hpp"

namespace longspan::comm {
namespace {

using stand_in::Alive;
using stand_in::alive;
using stand_in::Meeting;
using stand_in::run_ranks;
using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr int kRanks = 3;
constexpr std::size_t kBytes = 1001;  // no multiple of eight

/// The calls of PeerBuffers to a transport. `tamper` changes a rank's text on its way.
class ThreadTransport final : public Transport {
 public:
  using Tamper = std::function<std::string(const std::string& text, const std::string& step)>;

  ThreadTransport(std::shared_ptr<Meeting> meeting, int rank, int size)
      : meeting_(std::move(meeting)), rank_(rank), size_(size) {}
  Tamper tamper;
  std::string fails_at;  // the step whose gather throws, after it took place

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  Device device() const override { return Device::cuda; }
  std::chrono::milliseconds deadline() const override { return std::chrono::seconds(20); }
  std::string describe() const override { return "threads"; }
  std::shared_ptr<Transport> split(int, int) override { return nullptr; }
  std::uint32_t enlist(const std::shared_ptr<const RunLog>&) override { return 1; }
  void begin(RunName) override {}
  void refuse(const NamedValues&, const std::string&) override {}
  void disagree(RunName, int, const char*) override {}
  void wait(Stream, const char*) override {}
  void abort(const std::string&) noexcept override {}
  std::vector<std::string> gather(const std::string& mine, const std::string& step) override {
    const auto all = meeting_->meet(rank_, tamper ? tamper(mine, step) : mine);
    if (all.empty() || step == fails_at)
      throw RankError(ErrorKind::timeout, -1, step, "nobody came to '" + step + "'");
    return all;
  }

 protected:
  int start(const Collective&, Stream, const char*) override { return -1; }
  void finish(int, Stream) override {}
  bool test(int) override { return true; }
  void drop(int) noexcept override {}

 private:
  std::shared_ptr<Meeting> meeting_;
  int rank_, size_;
};

void set_to_seven(int* word) { *word = 7; }

/// A launch, as the run after a fallback begins with one.
void expect_runs() {
  int word = 0;
  EXPECT_NO_THROW(kernels::cuda::launch_kernel(set_to_seven, {1, 1}, &word));
  EXPECT_EQ(word, 7);
}

class PeerBuffersTest : public ::testing::Test {
 protected:
  void SetUp() override { stand_in::clear(); }
  void TearDown() override {
    EXPECT_EQ(stand_in::offences(), 0);
    stand_in::mislead(false);
    stand_in::clear();
  }
  std::shared_ptr<Meeting> meeting_ = std::make_shared<Meeting>(kRanks);
  ThreadTransport transport(int rank) const { return {meeting_, rank, kRanks}; }
};

TEST_F(PeerBuffersTest, WhatARankWritesTheOwnerSees) {
  const auto meeting = std::make_shared<Meeting>(kRanks);
  run_ranks(kRanks, [&](int rank) {
    ThreadTransport world = transport(rank);
    std::string why;
    const auto peer_buffers = PeerBuffers::open(world, kBytes, why);
    ASSERT_TRUE(peer_buffers) << why;
    EXPECT_EQ(peer_buffers->number(), 1u);
    EXPECT_EQ(peer_buffers->report().kind, PeerReport::none);
    const PeerView& view = peer_buffers->view();
    EXPECT_EQ(view.bytes, kBytes);
    EXPECT_EQ(view.epoch[0], 0u);
    for (std::size_t i = 0; i < kBytes; ++i)  // at rest a peer buffer is 0, whatever follows it
      ASSERT_EQ(view.peer_buffer[rank][i], std::byte{0}) << i;
    meeting->meet(rank, "");
    for (int p = 0; p < kRanks; ++p)
      if (p != rank) view.peer_buffer[p][rank] = static_cast<std::byte>(rank + 1);
    meeting->meet(rank, "");
    for (int p = 0; p < kRanks; ++p)
      EXPECT_EQ(view.peer_buffer[rank][p], static_cast<std::byte>(p == rank ? 0 : p + 1));
    meeting->meet(rank, "");
  });
}

/// One call fails on one rank. Every rank falls back and names that rank; nothing stays allocated
/// or mapped, and the next run finds no old error.
TEST_F(PeerBuffersTest, EveryCallThatFailsIsEverybodysReasonAndLeavesNothing) {
  for (int victim = 0; victim < kRanks; ++victim) {
    int call = 0;
    for (bool came = true; came;) {
      ++call;
      std::string failed;
      std::vector<std::string> why(kRanks);
      std::vector<char> opened(kRanks);
      run_ranks(kRanks, [&](int rank) {
        ThreadTransport world = transport(rank);
        if (rank == victim) stand_in::fail_call(call);
        {
          const auto peer_buffers = PeerBuffers::open(world, kBytes, why[rank]);
          opened[rank] = peer_buffers != nullptr;
          if (rank == victim) {
            failed = stand_in::failed_call();
            stand_in::fail_call(0);
          }
        }
        EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess) << "rank " << rank << " after " << failed;
        expect_runs();
      });
      came = !failed.empty();
      SCOPED_TRACE("call " + std::to_string(call) + " of rank " + std::to_string(victim) + ": " +
                   failed);
      for (int rank = 0; rank < kRanks; ++rank) {
        EXPECT_EQ(opened[rank], !came);
        if (!came) continue;
        EXPECT_EQ(why[rank], why[0]);
        EXPECT_THAT(why[rank], HasSubstr("rank " + std::to_string(victim) + ": "));
        EXPECT_THAT(why[rank], AnyOf(HasSubstr(failed), HasSubstr("is not visible")));
      }
      if (came) {
        EXPECT_EQ(alive(), Alive{});
      }
    }
    EXPECT_GT(call, 20);  // the calls were found
    stand_in::clear();
  }
}

TEST_F(PeerBuffersTest, APeerBufferThatIsOtherMemoryIsFound) {
  stand_in::mislead(true);
  run_ranks(kRanks, [&](int rank) {
    ThreadTransport world = transport(rank);
    std::string why;
    EXPECT_FALSE(PeerBuffers::open(world, kBytes, why));
    EXPECT_THAT(why,
                HasSubstr("rank 0: what is mapped as the peer buffer of rank 1 is other memory"));
  });
  EXPECT_EQ(alive(), Alive{});
}

TEST_F(PeerBuffersTest, ARankOfAnotherBootIsOnAnotherNode) {
  run_ranks(kRanks, [&](int rank) {
    ThreadTransport world = transport(rank);
    if (rank == 2)
      world.tamper = [](const std::string& text, const std::string& step) {
        if (step != "where the peer buffers would be") return text;
        auto parts = unpack(text);
        parts.at(1).back() =
            parts.at(1).back() == 'x' ? 'y' : 'x';  // the boot; the name is the same
        return pack_all(parts);
      };
    std::string why;
    EXPECT_FALSE(PeerBuffers::open(world, kBytes, why));
    EXPECT_EQ(why, "rank 2 is on another node than rank 0");
  });
  EXPECT_EQ(alive(), Alive{});
}

/// Layers end on each rank at any time. Memory that a peer may still write outlives its layer, and
/// is freed when the ranks next exchange about peer buffers.
TEST_F(PeerBuffersTest, MemoryIsFreedWhenEveryRankHasClosedIt) {
  const auto meeting = std::make_shared<Meeting>(kRanks);
  run_ranks(kRanks, [&](int rank) {
    ThreadTransport world = transport(rank);
    const auto set = std::make_shared<PeerBufferSet>();
    std::string why;
    auto first = PeerBuffers::open(world, kBytes, why, set);
    ASSERT_TRUE(first) << why;
    meeting->meet(rank, "");
    if (rank == 0) first.reset();
    meeting->meet(rank, "");
    if (rank != 0) {
      std::memset(first->view().peer_buffer[0], 1, kBytes);  // a peer that writes late
      first.reset();
    }
    meeting->meet(rank, "");
    if (rank == 0) {
      EXPECT_EQ(alive().mappings, 0);
      EXPECT_EQ(alive().memory, kRanks);  // closed by all, but no rank knows it yet
    }
    meeting->meet(rank, "");
    auto second = PeerBuffers::open(world, kBytes, why, set);
    ASSERT_TRUE(second) << why;
    EXPECT_EQ(second->number(), 2u);
    meeting->meet(rank, "");
    if (rank == 0) {
      EXPECT_EQ(alive().memory, 2 * kRanks);  // peer buffers and epochs of the second
    }
    meeting->meet(rank, "");
    second.reset();
    meeting->meet(rank, "");
    set->end(true);
  });
  EXPECT_EQ(alive(), Alive{});
}

TEST_F(PeerBuffersTest, OneRanksOpenPeerBufferKeepsEverybodysMemory) {
  const auto meeting = std::make_shared<Meeting>(kRanks);
  run_ranks(kRanks, [&](int rank) {
    ThreadTransport world = transport(rank);
    const auto set = std::make_shared<PeerBufferSet>();
    std::string why;
    auto first = PeerBuffers::open(world, kBytes, why, set);
    ASSERT_TRUE(first) << why;
    if (rank != 1) first.reset();
    auto second = PeerBuffers::open(world, kBytes, why, set);
    ASSERT_TRUE(second) << why;
    if (rank == 1) {
      std::memset(first->view().peer_buffer[0], 1, kBytes);
      std::memset(first->view().peer_buffer[2], 1, kBytes);
    }
    meeting->meet(rank, "");
    first.reset();
    second.reset();
    meeting->meet(rank, "");
    set->end(true);
  });
  EXPECT_EQ(alive(), Alive{});
}

TEST_F(PeerBuffersTest, WhatWasAbortedOrReportedIsKept) {
  for (const bool reported : {false, true}) {
    run_ranks(kRanks, [&](int rank) {
      ThreadTransport world = transport(rank);
      const auto set = std::make_shared<PeerBufferSet>();
      std::string why;
      auto peer_buffers = PeerBuffers::open(world, kBytes, why, set);
      ASSERT_TRUE(peer_buffers) << why;
      if (reported) {  // by a kernel, and the caller never checked
        std::atomic_ref(*peer_buffers->view().report)
            .store(PeerReport{PeerReport::timeout, 1, 17}.word());
        EXPECT_EQ(peer_buffers->report().run, 17u);
      } else {
        set->abort();
        EXPECT_EQ(*peer_buffers->view().abort, 1u);
      }
      const std::uint32_t* stop = peer_buffers->view().abort;
      peer_buffers.reset();
      EXPECT_EQ(*stop, 1u);
      set->end(!reported);
    });
    EXPECT_EQ(alive().memory, 2 * kRanks);
    EXPECT_EQ(alive().mappings, kRanks * (kRanks - 1));
    stand_in::clear();
  }
}

/// A gather that throws while peer buffers are opened: peers may have mapped them nevertheless.
TEST_F(PeerBuffersTest, AGatherThatFailsFreesNothingThatAPeerMayHave) {
  for (const std::string step : {"handles of the peer buffers", "opening of the peer buffers"}) {
    const auto meeting = std::make_shared<Meeting>(kRanks);
    run_ranks(kRanks, [&](int rank) {
      ThreadTransport world = transport(rank);
      std::string why;
      if (rank == 1) {
        world.fails_at = step;
        EXPECT_THROW(PeerBuffers::open(world, kBytes, why), RankError);
        if (step == "handles of the peer buffers") meeting_->meet(rank, "");  // the next gather
        meeting->meet(rank, "");
      } else {
        const auto peer_buffers = PeerBuffers::open(world, kBytes, why);
        ASSERT_TRUE(peer_buffers) << why;
        std::memset(peer_buffers->view().peer_buffer[1], 1, kBytes);
        meeting->meet(rank, "");
      }
    });
    EXPECT_EQ(alive().memory, kRanks);
    EXPECT_EQ(alive().mappings, 0);
    stand_in::clear();
  }
}

TEST(PeerReport, IsOneWord) {
  for (const auto kind : {PeerReport::timeout, PeerReport::aborted, PeerReport::differs})
    for (const std::uint32_t rank : {0u, 1u, 7u, 255u, 256u, (1u << 24) - 1})
      for (const std::uint32_t run : {0u, 1u, 0x80000000u, ~0u}) {
        const PeerReport found = PeerReport::of(PeerReport{kind, rank, run}.word());
        EXPECT_EQ(found.kind, kind);
        EXPECT_EQ(found.rank, rank);
        EXPECT_EQ(found.run, run);
        EXPECT_NE((PeerReport{kind, rank, run}.word()), 0u);
      }
  EXPECT_EQ(PeerReport{}.word(), 0u);
}

TEST(Launches, ReportTheirOwnStatusAndNoOther) {
  EXPECT_NE(cudaSetDevice(-1), cudaSuccess);  // by the caller, which did not check
  ASSERT_NE(cudaPeekAtLastError(), cudaSuccess);
  expect_runs();
  EXPECT_NE(cudaGetLastError(), cudaSuccess) << "the caller's error is not ours to take";

  int word = 0;
  stand_in::fail_call(1);
  EXPECT_THROW(kernels::cuda::launch_kernel(set_to_seven, {1, 1}, &word), BackendError);
  EXPECT_EQ(word, 0);
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
  expect_runs();
}

}  // namespace
}  // namespace longspan::comm
