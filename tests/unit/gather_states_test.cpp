// What gather-states asks of kernels and transport. What travels is decided by what all ranks were
// asked alike: a rank that times its phases takes other kernels, never another exchange.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "comm/self.hpp"
#include "kernels/backend.hpp"
#include "longspan/error.hpp"
#include "src/strategy/job.hpp"

namespace longspan {
namespace {

/// Kernels that only note what they are asked for.
class Notes final : public kernels::Backend {
 public:
  mutable std::vector<kernels::ExchangeParams> exchanges;
  mutable int pushes = 0, says = 0, merges = 0;

  Device device() const override { return Device::host; }
  void check(const kernels::AttendParams&) const override {}
  std::size_t attend_scratch(const kernels::AttendParams&) const override { return 0; }
  void attend(const kernels::AttendParams&, Stream) const override {}
  bool is_decode(const kernels::AttendParams&) const override { return true; }
  bool attend_exchanged(const kernels::AttendParams&, const kernels::ExchangeParams& e,
                        Stream) const override {
    exchanges.push_back(e);
    ++pushes;
    return true;
  }
  void exchange(const kernels::ExchangeParams& e, Stream) const override { exchanges.push_back(e); }
  void merge(const kernels::MergeParams&, Stream) const override { ++merges; }
  void digest(const kernels::DigestParams&, Stream) const override {}
  void say(const kernels::SayParams&, Stream) const override { ++says; }
  std::shared_ptr<std::byte> shared_memory(std::size_t) const override { return nullptr; }
  void map_rows(const kernels::MapParams&, Stream) const override {}
  void place_rows(const kernels::PlaceParams&, Stream) const override {}
  void key_starts(const kernels::KeyStartParams&, Stream) const override {}
  std::unique_ptr<kernels::Timer> timer(int) const override { return nullptr; }
};

/// One of two ranks, without the other.
class OneOfTwo final : public comm::SelfTransport {
 public:
  OneOfTwo() : SelfTransport(comm::milliseconds(1000)) {}
  int size() const override { return 2; }
  int gathers = 0;
  std::uint64_t* said = nullptr;
  void all_gather(const void*, void*, std::size_t, Stream, const char*,
                  std::uint64_t* words) override {
    ++gathers;
    said = words;
  }
};

Job job_of(const Notes& notes, OneOfTwo& world, const PeerView* peers) {
  Job job{notes, world, {}, {}, {}};
  job.attend.tokens = 2;
  job.attend.state = {nullptr, 2, 64, 2};
  job.merge.states = job.attend.state;
  job.peers = peers;
  job.window_rows = 16;
  job.say.hash = 42;
  job.enter = [](Phase) {};
  return job;
}

TEST(GatherStates, ARankThatTimesItsPhasesSendsWhatTheOthersSend) {
  Notes notes;
  OneOfTwo world;
  const PeerView peers;
  Job plain = job_of(notes, world, &peers), timed = job_of(notes, world, &peers);
  timed.timed = true;
  gather_states(plain);
  gather_states(timed);
  EXPECT_EQ(notes.pushes, 1) << "with times, attention and exchange are kernels of their own";
  ASSERT_EQ(notes.exchanges.size(), 2u);
  for (const kernels::ExchangeParams& exchange : notes.exchanges) {
    EXPECT_TRUE(exchange.pushed) << "the variant follows from this";
    EXPECT_EQ(exchange.hash, 42u);
  }
}

TEST(GatherStates, AllRanksTakeKernelsApartTogether) {
  Notes notes;
  OneOfTwo world;
  const PeerView peers;
  Job job = job_of(notes, world, &peers);
  job.apart = true;
  gather_states(job);
  ASSERT_EQ(notes.exchanges.size(), 1u);
  EXPECT_EQ(notes.pushes, 0);
  EXPECT_FALSE(notes.exchanges[0].pushed);
}

TEST(GatherStates, WhatIsGatheredCarriesWhatTheRankMeans) {
  Notes notes;
  OneOfTwo world;
  std::uint64_t words[2] = {};
  Job job = job_of(notes, world, nullptr);
  job.said = words;
  gather_states(job);
  EXPECT_EQ(notes.says, 1);
  EXPECT_EQ(world.gathers, 1);
  EXPECT_EQ(world.said, words);
  EXPECT_EQ(notes.merges, 1);
}

TEST(GatherStates, TakesWindowsWhereTheStatesFit) {
  Notes notes;
  OneOfTwo world;
  const PeerView peers;
  Job job = job_of(notes, world, &peers);
  job.window_rows = job.attend.state.rows - 1;
  gather_states(job);
  EXPECT_TRUE(notes.exchanges.empty());
  EXPECT_EQ(world.gathers, 1);
  job.window_rows = job.attend.state.rows;
  gather_states(job);
  EXPECT_EQ(notes.exchanges.size(), 1u);
  EXPECT_EQ(world.gathers, 1);
}

TEST(GatherStates, QueuesNoExchangeOnACommunicatorThatHasFailed) {
  Notes notes;
  OneOfTwo world;
  const PeerView peers;
  Job job = job_of(notes, world, &peers);
  world.abort("k.npy is truncated");
  EXPECT_THROW(gather_states(job), RankError);
  EXPECT_TRUE(notes.exchanges.empty());
  EXPECT_EQ(notes.pushes, 0);
}

TEST(RunHeaders, OneWordHasTheRunAndTheRank) {
  const std::uint64_t said[] = {7, 7, 9};
  const kernels::RunHeaders headers{said, 1, 3};
  EXPECT_EQ(headers.differing(), 2);
  EXPECT_EQ((kernels::RunHeaders{said, 1, 2}.differing()), -1);
  const std::uint64_t word = kernels::RunHeaders::reported(5, 2);
  EXPECT_EQ(word >> 32, 5u);
  EXPECT_EQ(static_cast<int>(word & 0xffffffffu) - 1, 2);
  EXPECT_NE(kernels::RunHeaders::reported(0, 0), 0u) << "0 says that all is well";
}

}  // namespace
}  // namespace longspan
