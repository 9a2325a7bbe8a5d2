// The transport over NCCL with peer buffers, between ranks that are threads, over stand-ins for
// CUDA and NCCL. The test writes the reports of exchange kernels. Any failure that ends the
// communicator ends the peer buffers of all its layers, and their memory is kept; otherwise all of
// it is freed.
#include "comm/nccl/transport.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "comm/gpu.hpp"
#include "longspan/element.hpp"
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
  Layer layer = world.open_peer_buffers(number, kBytes, why);
  EXPECT_TRUE(layer) << why;
  return layer;
}

/// As an exchange kernel does.
void report(const Layer& layer, const PeerReport& found) {
  std::uint64_t none = 0;
  std::atomic_ref(*layer->report).compare_exchange_strong(none, found.word());
}

/// A log whose run 17 had this many tokens.
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
           milliseconds deadline = std::chrono::seconds(20), int size = kRanks) {
    const auto nccl = std::make_shared<Meeting>(size);
    auto controls = stand_in::controls(size, deadline);
    stand_in::run_ranks(size, [&](int rank) {
      auto control = std::move(controls[static_cast<std::size_t>(rank)]);
      auto link = std::make_shared<Link>(stand_in::nccl_comm(nccl, rank, size), deadline);
      const auto world = nccl_transport(std::move(link), std::move(control), Place{1, rank, size});
      work(rank, *world);
    });
  }

  /// Rank 0 keeps all: its peer buffer, its epoch and its mapping of rank 1's peer buffer. So rank
  /// 1, which knows of nothing, never learns that its peer buffer is closed, and keeps it.
  static void expect_kept_by_rank_0() {
    EXPECT_EQ(alive().memory, 3);
    EXPECT_EQ(alive().host, 1);
    EXPECT_EQ(alive().mappings, 1);
  }

  /// The ranks meet outside the communicator.
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
    // Of ended layers, at most those of the last turn.
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
        // The caller may check any layer. Where it synchronised the stream itself it checks none,
        // and the next run reports it.
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
    EXPECT_EQ(alive().mappings, 2 * kRanks);  // kept, with the memory that they open
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

/// A kernel's wait failed and was reported; the caller synchronised the stream and released the
/// layer.
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

TEST_F(NcclTransportTest, AGatherThatFailsEndsThePeerBuffers) {
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

/// A stream that is not done is not an error, and the query must not leave one.
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

TEST_F(NcclTransportTest, EveryCollectiveAtOnceAndStarted) {
  run(
      [&](int rank, Transport& world) {
        const int size = world.size();
        for (const bool at_once : {true, false}) {
          const float mine = 10.0f + static_cast<float>(rank);
          std::vector<float> all(3, -1), send(3), got(3, -1), shifted(1, -1), sum(1, -1);
          for (int p = 0; p < size; ++p) send[p] = mine * static_cast<float>(p + 1);
          if (at_once) {
            world.all_gather(&mine, all.data(), sizeof mine, {}, "all gather");
            world.all_to_all(send.data(), got.data(), sizeof mine, {}, "all to all");
            world.shift(&mine, shifted.data(), sizeof mine, 1, {}, "shift");
            world.reduce_scatter(send.data(), sum.data(), 1, fp32, {}, "sum");
          } else {
            std::vector<Transfer> open;
            open.push_back(world.start_all_gather(&mine, all.data(), sizeof mine, {}, "a"));
            open.push_back(world.start_all_to_all(send.data(), got.data(), sizeof mine, {}, "b"));
            open.push_back(world.start_shift(&mine, shifted.data(), sizeof mine, 1, {}, "c"));
            open.push_back(world.start_reduce_scatter(send.data(), sum.data(), 1, fp32, {}, "d"));
            for (std::size_t i = open.size(); i-- > 0;) {
              EXPECT_TRUE(open[i].test());
              if (i != 2) open[i].wait({});  // one that nobody waits for
            }
          }
          world.wait({}, "all");
          EXPECT_EQ(all, (std::vector<float>{10, 11, 12}));
          for (int p = 0; p < size; ++p)
            EXPECT_EQ(got[p], (10.0f + static_cast<float>(p)) * static_cast<float>(rank + 1));
          EXPECT_EQ(shifted[0], 10.0f + static_cast<float>((rank + size - 1) % size));
          EXPECT_EQ(sum[0], 33.0f * static_cast<float>(rank + 1));
        }
      },
      std::chrono::seconds(20), 3);
  EXPECT_EQ(alive(), Alive{});
}

/// Rank r sends r numbers around the ring: rank 0 none, and rank 1 waits for none.
TEST_F(NcclTransportTest, ShiftsWhatDiffersInSizeAndCounts) {
  run(
      [&](int rank, Transport& world) {
        const int size = world.size(), from = (rank + size - 1) % size;
        const std::vector<float> mine(static_cast<std::size_t>(rank), static_cast<float>(rank));
        std::vector<float> got(4, -1);
        const std::uint64_t before = world.received_bytes();
        world
            .start_shift(mine.data(), mine.size() * 4, got.data(),
                         static_cast<std::size_t>(from) * 4, 1, {}, "ring")
            .wait({});
        world.wait({}, "all");
        for (int i = 0; i < 4; ++i)
          EXPECT_EQ(got[static_cast<std::size_t>(i)], i < from ? static_cast<float>(from) : -1.0f);
        EXPECT_EQ(world.received_bytes() - before, static_cast<std::uint64_t>(from) * 4);
        std::vector<float> all(static_cast<std::size_t>(size));
        const float one = 1;
        world.all_gather(&one, all.data(), sizeof one, {}, "gather");
        EXPECT_EQ(world.received_bytes() - before, static_cast<std::uint64_t>(from + size - 1) * 4);
      },
      std::chrono::seconds(20), 3);
}

/// Every rank sends a different number of bytes, at some distances none, to another place of the
/// receive buffer in every turn.
TEST_F(NcclTransportTest, ShiftsIntoReceiveBuffers) {
  constexpr int kSize = 3, kMost = 8, kTurns = 12;
  run(
      [&](int rank, Transport& world) {
        std::string why;
        const auto buffer = world.open_receive_buffer(2 * kMost * sizeof(int), why);
        ASSERT_TRUE(buffer) << why;
        const std::uint64_t before = world.received_bytes();
        std::uint64_t due = 0;
        for (int turn = 0; turn < kTurns; ++turn) {
          const int distance = turn % (2 * kSize) - kSize;
          const auto sent_by = [&](int one) { return (one + turn / 4) % kSize * (kMost / 2); };
          const int from = ((rank - distance) % kSize + kSize) % kSize;
          auto* const at = reinterpret_cast<int*>(buffer.get()) + turn % 2 * kMost;
          std::fill_n(reinterpret_cast<int*>(buffer.get()), 2 * kMost, -1);
          const std::vector<int> mine(static_cast<std::size_t>(sent_by(rank)), 100 * rank + turn);
          const auto received = static_cast<std::size_t>(sent_by(from)) * sizeof(int);
          world
              .start_shift(mine.data(), mine.size() * sizeof(int), at, received, distance, {},
                           "turn")
              .wait({});
          for (int i = 0; i < 2 * kMost; ++i) {
            const int place = i - turn % 2 * kMost;
            const bool came = place >= 0 && place < sent_by(from);
            EXPECT_EQ(reinterpret_cast<int*>(buffer.get())[i], came ? 100 * from + turn : -1)
                << "turn " << turn << ", place " << i;
          }
          if (from != rank) due += received;
          world.gather("", "end of the turn");  // since the receive buffer is filled anew
        }
        EXPECT_EQ(world.received_bytes() - before, due);
      },
      std::chrono::seconds(20), kSize);
  EXPECT_EQ(alive(), Alive{});
}

/// Every rank puts a column of numbers into a matrix of every rank, its own too, and meets the
/// others by counters, as kernels do between begin_puts and end_puts.
TEST_F(NcclTransportTest, KernelsPutRowsIntoTheReceiveBuffersOfAll) {
  constexpr int kSize = 3, kRows = 5, kTurns = 6;
  run(
      [&](int rank, Transport& world) {
        std::string why;
        const auto buffer = world.open_receive_buffer(kRows * kSize * sizeof(int), why);
        ASSERT_TRUE(buffer) << why;
        auto* const matrix = reinterpret_cast<int*>(buffer.get());
        EXPECT_EQ(world.place_at(buffer.get(), rank), buffer.get());
        std::byte elsewhere{};
        EXPECT_EQ(world.place_at(&elsewhere, rank), nullptr);
        constexpr std::size_t kReceived = (kSize - 1) * kRows * sizeof(int);
        const std::uint64_t before = world.received_bytes();
        const PutRanks among = world.begin_puts(buffer.get(), {}, "puts");
        PutFlags& own = *among.flags[rank];
        const auto await = [](std::uint64_t& counter, std::uint64_t count) {
          while (std::atomic_ref(counter).load() < count) std::this_thread::yield();
        };
        for (int turn = 0; turn < kTurns; ++turn) {
          const auto value = [&](int from, int to, int row) {
            return 1000 * turn + 100 * from + 10 * to + row;
          };
          const PutRanks now = world.begin_puts(buffer.get(), {}, "puts");
          EXPECT_EQ(now.rank, rank);
          EXPECT_EQ(now.ranks, kSize);
          EXPECT_TRUE(std::equal(now.flags, now.flags + kSize, among.flags));
          EXPECT_EQ(own.runs, static_cast<unsigned>(turn));
          std::fill_n(matrix, kRows * kSize, -1);
          for (int p = 0; p < kSize; ++p) ++std::atomic_ref(now.flags[p]->free[rank]);
          for (int p = 0; p < kSize; ++p) await(own.free[p], own.runs + 1);
          for (int to = 0; to < kSize; ++to) {
            for (int row = 0; row < kRows; ++row)
              *reinterpret_cast<int*>(
                  world.place_at(reinterpret_cast<std::byte*>(matrix + row * kSize + rank), to)) =
                  value(rank, to, row);
            std::atomic_ref(now.flags[to]->here[rank]) += PutFlags::kRun;
          }
          ++own.runs;
          for (int from = 0; from < kSize; ++from) await(own.here[from], own.runs * PutFlags::kRun);
          world.end_puts(buffer.get(), kReceived, {}, "puts");
          for (int i = 0; i < kRows * kSize; ++i)
            EXPECT_EQ(matrix[i], value(i % kSize, rank, i / kSize)) << "turn " << turn;
        }
        EXPECT_EQ(world.received_bytes() - before, kTurns * kReceived);
        EXPECT_THAT(own.ended, ::testing::Each(0u));
        EXPECT_THROW(static_cast<void>(world.begin_puts(&elsewhere, {}, "puts elsewhere")),
                     UsageError);
        EXPECT_THROW(world.end_puts(&elsewhere, 1, {}, "puts elsewhere"), UsageError);
        world.gather("", "before the end");
        world.abort("that is all");
        for (std::uint64_t* counters : {own.free, own.here, own.ended})  // which others free too
          for (int from = 0; from < PutFlags::kMostRanks; ++from)
            EXPECT_GE(std::atomic_ref(counters[from]).load(), std::uint64_t{0x7fffffff} << 32)
                << from;
        EXPECT_EQ(own.runs, static_cast<unsigned>(kTurns));
        EXPECT_THROW(static_cast<void>(world.begin_puts(buffer.get(), {}, "puts")), Error);
      },
      std::chrono::seconds(20), kSize);
}

/// The first launch of a kernel may block behind one that waits for another rank, as CUDA loads its
/// code then. The deadline holds there too.
TEST_F(NcclTransportTest, ALaunchThatBlocksBehindAWaitingKernelEndsAtTheDeadline) {
  run(
      [&](int rank, Transport& world) {
        std::string why;
        const auto buffer = world.open_receive_buffer(64, why);
        ASSERT_TRUE(buffer) << why;
        if (rank == 0) {
          const PutRanks among = world.begin_puts(buffer.get(), {}, "exchange of keys");
          auto* const word = const_cast<std::uint32_t*>(among.flags[rank]->abort);
          ASSERT_NE(word, nullptr);
          const auto last = std::chrono::steady_clock::now() + std::chrono::seconds(30);
          while (std::atomic_ref(*word).load() == 0 && std::chrono::steady_clock::now() < last)
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
          EXPECT_NE(std::atomic_ref(*word).load(), 0u) << "it blocked for ever";
          try {
            world.end_puts(buffer.get(), 64, {}, "exchange of keys");
            ADD_FAILURE() << "nobody was told";
          } catch (const Error& error) {
            EXPECT_THAT(error.what(), HasSubstr("exchange of keys"));
          }
        }
        meet(rank);
      },
      std::chrono::seconds(1));
}

/// A call that fails on one rank is the reason on all, and NCCL does a shift into other memory.
TEST_F(NcclTransportTest, AReceiveBufferThatOneRankCannotOpenIsNobodys) {
  int failures = 0;
  for (int call = 1; call < 60; ++call) {
    run([&](int rank, Transport& world) {
      if (rank == 1) stand_in::fail_call(call);
      std::string why;
      const auto buffer = world.open_receive_buffer(64, why);
      const bool failed = rank == 1 && !stand_in::failed_call().empty();
      if (rank == 1) stand_in::fail_call(0);
      EXPECT_EQ(buffer == nullptr, !why.empty());
      if (failed && !buffer) {
        EXPECT_THAT(why, HasSubstr("rank 1: "));
        ++failures;
      }
      const auto both = world.gather(buffer ? "open" : why, "what came of it");
      EXPECT_EQ(both[0], both[1]);
    });
    EXPECT_EQ(stand_in::offences(), 0);
    stand_in::clear();
  }
  EXPECT_GE(failures, 15);
}

/// What transfers need is made before the first of them; more is made only where more are open than
/// ever before.
TEST_F(NcclTransportTest, StartedTransfersTakeNothingNew) {
  run([&](int rank, Transport& world) {
    int value = rank, got[kRanks];
    meet(rank);
    const Alive before = alive();
    meet(rank);
    for (int turn = 0; turn < 100; ++turn) {
      std::vector<Transfer> open;
      for (int i = 0; i < 8; ++i)
        open.push_back(world.start_all_gather(&value, got, sizeof value, {}, "gather"));
      open[3] = {};
      for (Transfer& one : open) one.wait({});
    }
    meet(rank);
    EXPECT_EQ(alive(), before);
    meet(rank);
    std::vector<Transfer> many;
    for (int i = 0; i < 20; ++i)
      many.push_back(world.start_all_gather(&value, got, sizeof value, {}, "gather"));
    meet(rank);
    EXPECT_EQ(alive().events, before.events + 12 * kRanks);
    meet(rank);
  });
  EXPECT_EQ(alive(), Alive{});
}

/// One of the calls of a start fails: the number is given back, and the communicator goes on.
TEST_F(NcclTransportTest, AStartThatFailsLeavesNothingOpen) {
  run([&](int rank, Transport& world) {
    int value = rank, got[kRanks];
    meet(rank);
    const Alive before = alive();
    meet(rank);
    for (int turn = 0; turn < 20; ++turn) {
      stand_in::fail_call(1);  // on both ranks, before NCCL
      EXPECT_THROW(
          static_cast<void>(world.start_all_gather(&value, got, sizeof value, {}, "gather")),
          BackendError);
      EXPECT_EQ(stand_in::failed_call(), "cudaEventRecord");
      stand_in::fail_call(0);
    }
    Transfer works = world.start_all_gather(&value, got, sizeof value, {}, "gather");
    works.wait({});
    EXPECT_EQ(got[1], 1);
    meet(rank);
    EXPECT_EQ(alive(), before);
    meet(rank);
  });
}

TEST_F(NcclTransportTest, AfterAnAbortTransfersThrowAndEnd) {
  run([&](int rank, Transport& world) {
    int value = rank, got[kRanks];
    Transfer one = world.start_all_gather(&value, got, sizeof value, {}, "gather");
    Transfer other = world.start_all_gather(&value, got, sizeof value, {}, "gather");
    const Transfer dropped = world.start_all_gather(&value, got, sizeof value, {}, "gather");
    meet(rank);
    world.abort("no more");
    EXPECT_THROW(one.test(), RankError);
    EXPECT_THROW(one.wait({}), RankError);
    one.wait({});
    EXPECT_THROW(other.wait({}), RankError);
    EXPECT_THROW(static_cast<void>(world.start_shift(&value, got, 4, 1, {}, "later")), RankError);
    meet(rank);
  });
}

TEST_F(NcclTransportTest, SplitsIntoPartsWithTheirOwnCommunicators) {
  constexpr int kAll = 5;
  Meeting all_ranks(kAll);
  const int before = stand_in::nccl_comms_alive();  // earlier tests have left some to threads
  run(
      [&](int rank, Transport& world) {
        std::shared_ptr<Transport> inner;
        {
          const auto part = world.split(rank == 4 ? -1 : rank % 2, -rank);
          EXPECT_EQ(part == nullptr, rank == 4);
          if (part) {
            ASSERT_EQ(part->size(), 2);
            EXPECT_EQ(part->rank(), rank < 2);
            int got[2];
            part->all_gather(&rank, got, sizeof rank, {}, "part");
            EXPECT_EQ(got[0], 2 + rank % 2);
            EXPECT_EQ(got[1], rank % 2);
            EXPECT_EQ(part->gather(std::to_string(rank), "who"),
                      (std::vector<std::string>{std::to_string(got[0]), std::to_string(got[1])}));
            EXPECT_EQ(part->name_of(0), "0 (" + std::to_string(got[0]) + " of all)");
            inner = part->split(part->rank(), 0);
            EXPECT_EQ(inner->size(), 1);
            int own = -1;
            inner->all_gather(&rank, &own, sizeof rank, {}, "alone");
            EXPECT_EQ(own, rank);
          }
          int got[kAll];
          world.all_gather(&rank, got, sizeof rank, {}, "all");
          EXPECT_EQ(got[4], 4);
        }
        EXPECT_THROW(world.split(0, 0)->shift(nullptr, 0, nullptr, 1, kAll, {}, "to itself"),
                     UsageError);
        all_ranks.meet(rank, "");
      },
      std::chrono::seconds(20), kAll);
  EXPECT_EQ(alive(), Alive{});
  EXPECT_LE(stand_in::nccl_comms_alive(), before);
}

TEST_F(NcclTransportTest, AnAbortEndsThePartsAndNoneOfAPartEndsTheWhole) {
  run([&](int rank, Transport& world) {
    const auto part = world.split(0, 0), other = world.split(0, -rank);
    meet(rank);
    if (rank == 0) other->abort("of the other alone");
    EXPECT_THROW(other->gather("", "ended"), RankError);
    part->gather("", "the part lives on");
    world.gather("", "the whole lives on");
    const Layer layer = open(*part);
    meet(rank);
    if (rank == 0) world.abort("k.npy is truncated");
    try {
      part->gather("", "a step");
      ADD_FAILURE() << "went on";
    } catch (const RankError& error) {
      EXPECT_EQ(error.rank(), 0);
      EXPECT_THAT(error.what(), HasSubstr("Rank 0 gave up: k.npy is truncated"));
    }
    EXPECT_TRUE(stopped(layer));
    EXPECT_THROW(part->check("attention"), RankError);
    EXPECT_THROW(world.gather("", "a step"), RankError);
    meet(rank);
  });
}

/// A rank that finds no memory for its part tells the others of the part at once.
TEST_F(NcclTransportTest, APartThatOneRankCannotMakeIsEverybodysError) {
  run([&](int rank, Transport& world) {
    meet(rank);
    try {
      // After the calls to meet and to split: in those that make the part.
      if (rank == 1) stand_in::fail_call(40);
      static_cast<void>(world.split(0, 0));
      ADD_FAILURE() << "went on";
    } catch (const BackendError& error) {
      EXPECT_EQ(rank, 1);
      EXPECT_THAT(error.what(), HasSubstr("out of memory"));
    } catch (const RankError& error) {
      EXPECT_EQ(rank, 0);
      EXPECT_EQ(error.rank(), 1);
      EXPECT_THAT(error.what(), HasSubstr("Rank 1 (1 of all) gave up"));
    }
    stand_in::fail_call(0);
    meet(rank);
    world.gather("", "the whole lives on");
    meet(rank);
  });
}

TEST(GpuSelf, StartsItsCopiesOnAStreamOfItsOwn) {
  stand_in::clear();
  {
    const auto world = gpu_self(std::chrono::seconds(1), -1);
    EXPECT_EQ(alive(), Alive{}) << "nothing is made for who starts nothing";
    int send = 7, got = 0, sum = 0;
    Transfer one = world->start_shift(&send, &got, sizeof got, 1, {}, "ring");
    Transfer other = world->start_reduce_scatter(&send, &sum, 1, fp32, {}, "sum");
    EXPECT_EQ(alive().streams, 1);
    other.wait({});
    EXPECT_TRUE(one.test());
    one.wait({});
    EXPECT_EQ(got, 7);
    EXPECT_EQ(sum, 7);
    const auto part = world->split(0, 0);
    EXPECT_EQ(part->device(), Device::cuda);
    EXPECT_FALSE(world->split(-1, 0));
    Transfer late = part->start_shift(&send, &got, sizeof got, 1, {}, "ring");
    world->abort("no more");
    EXPECT_THROW(late.wait({}), RankError);
  }
  EXPECT_EQ(alive(), Alive{});
}

/// One of the calls that make a rank's communicator fails: nothing of NCCL's is left.
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
