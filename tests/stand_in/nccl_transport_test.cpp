// The transport over NCCL with windows, between ranks that are threads, over stand-ins of CUDA and
// NCCL. What exchange kernels would report a test writes for them. Whatever ends the communicator
// ends the windows of all its layers, and their memory is kept; else all of it is freed.
#include "comm/nccl/transport.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "longspan/error.hpp"
#include "tests/stand_in/gpus.hpp"
#include "tests/stand_in/ranks.hpp"

namespace longspan::comm {
namespace {

using stand_in::Alive;
using stand_in::alive;
using stand_in::Meeting;
using ::testing::HasSubstr;

constexpr int kRanks = 2;
constexpr std::size_t kBytes = 4096;

using Layer = std::shared_ptr<const PeerView>;

Layer open(Transport& world, std::uint32_t number = 1) {
  std::string why;
  Layer layer = world.open_windows(number, kBytes, why);
  EXPECT_TRUE(layer) << why;
  return layer;
}

/// As an exchange kernel does it.
void report(const Layer& layer, const PeerReport& found) {
  std::uint64_t none = 0;
  std::atomic_ref(*layer->report).compare_exchange_strong(none, found.word());
}

/// A log whose run 17 had so many tokens.
class Log final : public RunLog {
 public:
  explicit Log(int tokens) : tokens_(tokens) {}
  NamedValues describe(std::uint32_t run) const override {
    return run == 17 ? NamedValues{{"tokens", std::to_string(tokens_)}} : NamedValues{};
  }

 private:
  int tokens_;
};

bool stopped(const Layer& layer) { return std::atomic_ref(*layer->abort).load() != 0; }

class NcclTransportTest : public ::testing::Test {
 protected:
  void SetUp() override { stand_in::clear(); }
  void TearDown() override {
    EXPECT_EQ(stand_in::offences(), 0);
    stand_in::keep_streams_busy(false);
    stand_in::clear();
  }

  /// work(rank, transport) on each rank; the transports end with it.
  void run(const std::function<void(int, Transport&)>& work,
           milliseconds deadline = std::chrono::seconds(20)) {
    const auto nccl = std::make_shared<Meeting>(kRanks);
    auto controls = stand_in::controls(kRanks, deadline);
    stand_in::run_ranks(kRanks, [&](int rank) {
      auto control = std::move(controls[static_cast<std::size_t>(rank)]);
      auto link = std::make_shared<Link>(stand_in::nccl_comm(nccl, rank, kRanks), deadline);
      const auto world =
          nccl_transport(std::move(link), std::move(control), Place{1, rank, kRanks});
      work(rank, *world);
    });
  }

  /// Rank 0 keeps all: its window, its epoch and its mapping of rank 1's window. So rank 1, which
  /// knows of nothing, waits in vain to hear that its window is closed, and keeps that.
  static void expect_kept_by_rank_0() {
    EXPECT_EQ(alive().memory, 3);
    EXPECT_EQ(alive().host, 1);
    EXPECT_EQ(alive().mappings, 1);
  }

  /// The ranks meet outside of the communicator.
  void meet(int rank) { meeting_.meet(rank, ""); }

 private:
  Meeting meeting_{kRanks};
};

TEST_F(NcclTransportTest, ThatEndsWellLeavesNothing) {
  run([&](int rank, Transport& world) {
    for (int turn = 0; turn < 20; ++turn) {
      const Layer layer = open(world), other = open(world);
      world.check("attention");
      world.wait({}, "attention");
      if (rank == turn % 2) std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    meet(rank);
    // Of layers that have gone, those of the last turn at most.
    EXPECT_LE(alive().memory, 2 * kRanks);
    EXPECT_EQ(alive().mappings, 0);
    meet(rank);
  });
  EXPECT_EQ(alive(), Alive{});
  EXPECT_EQ(stand_in::nccl_comms_alive(), 0);
}

TEST_F(NcclTransportTest, ADifferenceNamesWhatDiffersInTheLayerWhoseExchangeItWas) {
  for (const bool at_next_run : {false, true}) {
    run([&](int rank, Transport& world) {
      const auto alike = std::make_shared<Log>(4), unlike = std::make_shared<Log>(4 + rank);
      const Layer first = open(world, world.enlist(alike)),
                  second = open(world, world.enlist(unlike));
      world.begin({1, 20});  // many runs later, and of another layer
      report(second, {PeerReport::differs, static_cast<std::uint32_t>(1 - rank), 17});
      meet(rank);
      try {
        // Of whichever layer the caller asks; it does not ask at all where it synchronised the
        // stream itself, and then the next run says it.
        at_next_run ? world.check("attention") : world.wait({}, "attention");
        ADD_FAILURE() << "nothing was thrown";
      } catch (const UsageError& error) {
        EXPECT_THAT(error.what(), HasSubstr("'tokens' differs between ranks at 'attention': rank 0 "
                                            "has 4, rank 1 has 5."));
      }
      EXPECT_TRUE(stopped(first));
      EXPECT_TRUE(stopped(second));
      EXPECT_THROW(world.check("attention"), UsageError);
      EXPECT_THROW(world.wait({}, "attention"), UsageError);
      meet(rank);
    });
    EXPECT_EQ(alive().mappings, 2 * kRanks);  // kept, with what they lead to
    EXPECT_EQ(alive().memory, 4 * kRanks);
    stand_in::clear();
  }
}

/// As by a run that was captured in a graph long ago.
TEST_F(NcclTransportTest, ADifferenceThatNoLogExplainsNamesTheRanks) {
  run([&](int rank, Transport& world) {
    const auto log = std::make_shared<Log>(4 + rank);
    const Layer layer = open(world, world.enlist(log));
    report(layer, {PeerReport::differs, static_cast<std::uint32_t>(1 - rank), 16});
    meet(rank);
    try {
      world.wait({}, "attention");
      ADD_FAILURE() << "nothing was thrown";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(),
                  ::testing::MatchesRegex("Rank [01] runs another attention than rank "
                                          "[01] at 'attention': .*"));
    }
    meet(rank);
  });
  stand_in::clear();
}

/// A kernel that waited in vain has reported, and the caller synchronised the stream and let go.
TEST_F(NcclTransportTest, AReportThatNobodyReadKeepsTheMemory) {
  run([&](int rank, Transport& world) {
    Layer layer = open(world);
    if (rank == 0) report(layer, {PeerReport::timeout, 1, 3});
    meet(rank);
    layer.reset();
    meet(rank);
  });
  expect_kept_by_rank_0();
}

TEST_F(NcclTransportTest, AGatherThatFailsEndsTheWindows) {
  run(
      [&](int rank, Transport& world) {
        const Layer layer = open(world);
        meet(rank);
        if (rank == 0) {
          EXPECT_THROW(world.gather("", "a step"), RankError);  // rank 1 does not come
          EXPECT_TRUE(stopped(layer));
          EXPECT_THROW(world.check("attention"), RankError);
        }
        meet(rank);
      },
      std::chrono::seconds(1));
  expect_kept_by_rank_0();
}

TEST_F(NcclTransportTest, AnAbortIsSeenByTheNextRun) {
  run([&](int rank, Transport& world) {
    const Layer layer = open(world);
    meet(rank);
    if (rank == 0) world.abort("k.npy is truncated");
    meet(rank);
    if (rank == 0) {
      EXPECT_TRUE(stopped(layer));
      EXPECT_THROW(world.check("attention"), RankError);
    } else {
      EXPECT_THROW(world.gather("", "a step"), RankError);
      EXPECT_TRUE(stopped(layer));
    }
    meet(rank);
  });
  EXPECT_EQ(alive().mappings, kRanks);
}

/// A stream that is not done is no error, and none may be left of having looked.
TEST_F(NcclTransportTest, WaitingLeavesNoError) {
  run([&](int rank, Transport& world) {
    meet(rank);
    stand_in::keep_streams_busy(true);
    meet(rank);
    if (rank == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      stand_in::keep_streams_busy(false);
    } else {
      world.wait({}, "attention");
      EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
    }
    meet(rank);
  });
}

/// Layers may end on other threads than the one that waits.
TEST_F(NcclTransportTest, LayersEndWhileAnotherThreadWaits) {
  run([&](int rank, Transport& world) {
    for (int turn = 0; turn < 20; ++turn) {
      std::vector<Layer> layers;
      for (int i = 0; i < 4; ++i) layers.push_back(open(world));
      std::atomic<bool> done = false;
      std::thread other([&] {
        for (Layer& layer : layers) layer.reset();
        done = true;
      });
      do world.wait({}, "attention");
      while (!done);
      other.join();
    }
    meet(rank);
  });
  EXPECT_EQ(alive(), Alive{});
}

/// One of the calls by which a rank comes to its communicator fails: nothing of NCCL's is left.
TEST_F(NcclTransportTest, ALinkThatCannotBeMadeEndsItsCommunicator) {
  const auto nccl = std::make_shared<Meeting>(kRanks);
  for (int call = 1; call <= 40; ++call) {
    ncclComm_t comm = stand_in::nccl_comm(nccl, 0, kRanks);
    const int before = stand_in::nccl_comms_alive();
    stand_in::fail_call(call);
    EXPECT_THROW(Link(comm, std::chrono::seconds(1)), BackendError);
    EXPECT_NE(stand_in::failed_call(), "");
    EXPECT_EQ(stand_in::nccl_comms_alive(), before - 1);
    EXPECT_EQ(alive(), Alive{});
    EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
  }
}

}  // namespace
}  // namespace longspan::comm
