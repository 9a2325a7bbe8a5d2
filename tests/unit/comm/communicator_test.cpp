// Tests of one process: self, the watchdog, the wire, and agreement with itself.
#include "longspan/communicator.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <numeric>
#include <optional>
#include <random>
#include <thread>

#include "comm/control/watchdog.hpp"
#include "comm/control/wire.hpp"
#include "comm/transport.hpp"
#include "longspan/error.hpp"
#include "tests/support/fresh_seed.hpp"
#include "tests/support/no_threads.hpp"

namespace longspan {
namespace {

using namespace std::chrono_literals;

TEST(Self, EveryCollectiveIsACopy) {
  const Communicator world = self();
  EXPECT_EQ(world.rank(), 0);
  EXPECT_EQ(world.size(), 1);
  EXPECT_EQ(world.device(), Device::host);
  std::vector<unsigned> send(1000), got;
  std::mt19937 random(tests::fresh_seed());
  for (unsigned& value : send) value = random();
  const std::size_t bytes = send.size() * sizeof(unsigned);

  got.assign(send.size(), 0xA5A5A5A5u);
  comm::transport_of(world).all_gather(send.data(), got.data(), bytes, {}, "test");
  EXPECT_EQ(got, send);
  got.assign(send.size(), 0xA5A5A5A5u);
  comm::transport_of(world).all_to_all(send.data(), got.data(), bytes, {}, "test");
  EXPECT_EQ(got, send);
  got.assign(send.size(), 0xA5A5A5A5u);
  comm::transport_of(world).shift(send.data(), got.data(), bytes, -3, {}, "test");
  EXPECT_EQ(got, send);
  comm::transport_of(world).all_gather(got.data(), got.data(), bytes, {}, "in place");
  EXPECT_EQ(got, send);
  comm::transport_of(world).all_gather(nullptr, nullptr, 0, {}, "nothing");
  comm::transport_of(world).wait({}, "test");
  EXPECT_EQ(world.gather("a\0b", "test"), std::vector<std::string>{"a\0b"});
  world.barrier("test");
  agree(world, {{"heads", "1"}}, "test");
}

TEST(Self, SumsAreCopiesToo) {
  const Communicator world = self();
  comm::Transport& transport = comm::transport_of(world);
  std::vector<std::uint16_t> send(1001), got(1001, 0xA5A5);
  std::mt19937 random(tests::fresh_seed());
  for (auto& value : send) value = static_cast<std::uint16_t>(random());
  transport.reduce_scatter(send.data(), got.data(), send.size(), bf16, {}, "sum");
  EXPECT_EQ(got, send);
  EXPECT_THROW(transport.reduce_scatter(send.data(), got.data(), 1, e4m3, {}, "no sum"),
               Unsupported);
}

TEST(Self, StartedCollectivesEndWhereTheyAreWaitedForOrDropped) {
  comm::Transfer after_all;
  {
    const Communicator world = self();
    int send = 17, got = 0, dropped = 0;
    comm::Transfer transfer =
        comm::transport_of(world).start_shift(&send, &got, sizeof got, 1, {}, "ring");
    comm::Transfer moved = std::move(transfer);
    EXPECT_TRUE(moved.test());
    transfer.wait({});
    moved.wait({});
    EXPECT_EQ(got, 17);
    moved.wait({});
    EXPECT_TRUE(moved.test());
    {
      const comm::Transfer nobody_waits = comm::transport_of(world).start_all_gather(
          &send, &dropped, sizeof dropped, {}, "dropped");
    }
    EXPECT_EQ(dropped, 17);
    after_all = comm::transport_of(world).start_all_to_all(&send, &got, sizeof got, {}, "late");
    world.abort("no more");
    EXPECT_THROW(
        static_cast<void>(comm::transport_of(world).start_shift(&send, &got, 4, 0, {}, "later")),
        RankError);
  }
  EXPECT_THROW(after_all.wait({}), RankError);  // it kept the communicator
  after_all.wait({});
}

TEST(Self, SplitsIntoItself) {
  std::optional<Communicator> child, grandchild;
  {
    const Communicator world = self();
    EXPECT_FALSE(world.split(-1));
    child = world.split(3, -7);
    ASSERT_TRUE(child);
    EXPECT_EQ(child->size(), 1);
    EXPECT_EQ(child->deadline(), world.deadline());
    grandchild = child->split(0);
    grandchild->abort("no more");
    EXPECT_THROW(grandchild->barrier("test"), RankError);
    world.barrier("test");
    child->barrier("test");
    grandchild = child->split(0);
  }
  child->abort("no more");
  EXPECT_THROW(grandchild->barrier("test"), RankError);
}

TEST(Self, AfterAnAbortEveryCallSaysWhy) {
  const Communicator world = self();
  world.abort("no more");
  world.abort("something else");
  int value = 0;
  const auto expect_refused = [](const std::function<void()>& call) {
    try {
      call();
      ADD_FAILURE() << "went on";
    } catch (const RankError& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr("no more"));
    }
  };
  expect_refused([&] { world.barrier("test"); });
  expect_refused([&] { comm::transport_of(world).wait({}, "test"); });
  expect_refused([&] { comm::transport_of(world).all_gather(&value, &value, 4, {}, "test"); });
}

#if !defined(LONGSPAN_HAVE_CUDA)
TEST(Self, CudaIsRefusedByNameWithoutCuda) { EXPECT_THROW(self(Device::cuda), Unsupported); }
#endif

TEST(Wire, GivesBackWhatWasPacked) {
  const std::vector<std::string> texts = {"", "a", std::string("\0:\n12:", 6),
                                          std::string(100000, 'x'), ""};
  EXPECT_EQ(comm::unpack(comm::pack_all(texts)), texts);
  EXPECT_TRUE(comm::unpack("").empty());
}

TEST(Wire, TextsOfOthersAreShownWithoutWhatTerminalsObey) {
  const auto shown = [](std::string_view text) { return comm::printable(text); };
  EXPECT_EQ(shown("plain text, Größe \xe2\x82\xac"), "plain text, Größe \xe2\x82\xac");
  EXPECT_EQ(shown("a\n\tb\x1b[31m\x7f"), "a\\n\\tb\\x1b[31m\\x7f");
  EXPECT_EQ(shown(std::string_view("\0", 1)), "\\x00");
  EXPECT_EQ(shown("\xff\xc3"), "\\xff\\xc3");                             // not UTF-8
  EXPECT_EQ(shown("\xc0\x80\xed\xa0\x80"), "\\xc0\\x80\\xed\\xa0\\x80");  // nor is this
  EXPECT_EQ(shown("\xc2\x9b"), "\\xc2\\x9b");                             // begins commands, too
  const std::string cut = shown(std::string(3018, 'x'));
  EXPECT_EQ(cut, std::string(500, 'x') + "... (cut, of 3018 bytes)");
  EXPECT_EQ(shown(std::string(500, 'x')), std::string(500, 'x'));
}

TEST(Wire, RefusesDamage) {
  for (const char* damaged : {"5:abc", "abc", ":", "-1:", "3", "99999999999999999999:a"})
    EXPECT_THROW(comm::unpack(damaged), Error) << damaged;
}

/// Slots that the test finishes by hand.
struct Work {
  std::array<std::atomic<bool>, 4> done{};
  std::atomic<int> aborts{0};
  comm::Watchdog watchdog;

  explicit Work(std::chrono::milliseconds deadline)
      : watchdog({.deadline = deadline,
                  .slots = 4,
                  .prepare = {},
                  .done = [this](int slot) { return done[slot].load(); },
                  .abort = [this] { ++aborts; }}) {}

  template <class Condition>
  static bool comes_true(Condition condition) {
    for (int i = 0; i < 20000 && !condition(); ++i) std::this_thread::sleep_for(1ms);
    return condition();
  }
};

TEST(Watchdog, NamesTheStepThatDoesNotFinishAndAbortsOnce) {
  Work work(50ms);
  for (const char* step : {"first", "second"})
    work.watchdog.watch(*work.watchdog.free_slot(), step);
  work.done[0] = true;
  ASSERT_TRUE(Work::comes_true([&] { return work.watchdog.expired().has_value(); }));
  EXPECT_EQ(*work.watchdog.expired(), "second");
  ASSERT_TRUE(Work::comes_true([&] { return work.aborts > 0; }));
  work.watchdog.abort();
  std::this_thread::sleep_for(150ms);
  EXPECT_EQ(work.aborts, 1);
}

TEST(Watchdog, LeavesFinishedWorkAlone) {
  Work work(60s);
  for (int round = 0; round < 20; ++round) {
    ASSERT_TRUE(Work::comes_true([&] { return work.watchdog.free_slot().has_value(); }));
    const int slot = *work.watchdog.free_slot();
    work.done[slot] = true;
    work.watchdog.watch(slot, "step");
  }
  EXPECT_FALSE(work.watchdog.expired());
  EXPECT_EQ(work.aborts, 0);
}

TEST(Watchdog, HasNoSlotWhileAllAreTaken) {
  Work work(60s);
  for (int i = 0; i < 4; ++i) work.watchdog.watch(*work.watchdog.free_slot(), "step");
  EXPECT_FALSE(work.watchdog.free_slot());
  for (auto& done : work.done) done = true;
  EXPECT_TRUE(Work::comes_true([&] { return work.watchdog.free_slot().has_value(); }));
}

TEST(Watchdog, AbortsWhenAskedEvenOnTheWayOut) {
  std::atomic<int> aborts{0};
  {
    comm::Watchdog watchdog({.deadline = 60s,
                             .slots = 1,
                             .prepare = {},
                             .done = [](int) { return true; },
                             .abort = [&] { ++aborts; }});
    watchdog.abort();
  }
  EXPECT_EQ(aborts, 1);
}

TEST(Watchdog, WithoutAThreadIsATypedError) {
  const auto make = [] {
    comm::Watchdog watchdog({.deadline = 60s,
                             .slots = 1,
                             .prepare = {},
                             .done = [](int) { return true; },
                             .abort = [] {}});
  };
  {
    const tests::NoThreads none;
    EXPECT_THROW(make(), BackendError);
  }
  make();
}

}  // namespace
}  // namespace longspan
