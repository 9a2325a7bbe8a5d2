// The requests of gather-states to kernels and transport. Only options that are the same on all
// ranks decide what travels: a rank that times its phases takes other kernels, never another
// exchange.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "comm/self.hpp"
#include "kernels/backend.hpp"
#include "longspan/error.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {
namespace {

/// Kernels that only record their requests.
class Notes final : public kernels::Backend {
 public:
  mutable std::vector<kernels::ExchangeParams> exchanges;
  mutable int pushes = 0, digests_written = 0, merges = 0;

  Device device() const override { return Device::host; }
  void check(const kernels::AttendParams&) const override {}
  std::size_t attend_scratch(const kernels::AttendParams&) const override { return 0; }
  bool attend(const kernels::AttendParams&, const kernels::Epilogue& epilogue, Stream stream,
              const kernels::EpilogueBegins& begins, const kernels::BetweenTiles&) const override {
    const auto* e = std::get_if<kernels::ExchangeParams>(&epilogue);
    if (e == nullptr || e->apart || begins) {
      queue(epilogue, stream, begins);
      return false;
    }
    exchanges.push_back(*e);
    ++pushes;
    return true;
  }
  void exchange(const kernels::ExchangeParams& e, Stream) const override { exchanges.push_back(e); }
  void merge(const kernels::MergeParams&, Stream) const override { ++merges; }
  std::size_t peer_buffer_bytes(std::int64_t, int, int) const override { return 1; }
  void digest(const kernels::DigestParams&, Stream) const override {}
  void write_run_digest(const kernels::RunDigestParams&, Stream) const override {
    ++digests_written;
  }
  std::shared_ptr<std::byte> shared_memory(std::size_t) const override { return nullptr; }
  void map_rows(const kernels::MapParams&, Stream) const override {}
  void place_rows(const kernels::PlaceParams&, Stream) const override {}
  void pack_outputs(const kernels::PackOutputsParams&, Stream) const override {}
  void copy_rows(std::span<const StridedCopy>, Stream) const override {}
  void pack_states(const kernels::PackStatesParams&, Stream) const override {}
  void key_starts(const kernels::KeyStartParams&, Stream) const override {}
  void row_starts(const kernels::RowStartParams&, Stream) const override {}
  void copy_keys(const kernels::CopyKeysParams&, Stream) const override {}
  void move_keys(const kernels::MoveKeysParams&, Stream) const override {}
  void append(const kernels::AppendParams&, Stream) const override {}
  void rotate_rows(const kernels::RotateParams&, Stream) const override {}
  void check_arrays(const kernels::CheckParams&, Stream) const override {}
  void attend_context(const kernels::ContextParams&, Stream) const override {}
  void cut_context(const kernels::ContextCutParams&, Stream) const override {}
  void merge_outputs(const kernels::MergeOutputsParams&, Stream) const override {}
  void export_segments(const kernels::ExportSegmentsParams&, Stream) const override {}
  void reduce_segments(const kernels::ReduceSegmentsParams&, Stream) const override {}
  std::unique_ptr<kernels::Timer> timer(int) const override { return nullptr; }
};

/// One of two ranks, without the other.
class OneOfTwo final : public comm::SelfTransport {
 public:
  OneOfTwo() : SelfTransport(comm::milliseconds(1000)) {}
  int size() const override { return 2; }
  int gathers = 0;
  std::uint64_t* digests = nullptr;
  std::shared_ptr<const PeerView> open_peer_buffers(std::uint32_t, std::size_t,
                                                    std::string&) override {
    return std::make_shared<PeerView>();
  }

 protected:
  int start(const comm::Collective& collective, Stream, const char*) override {
    gathers += collective.kind == comm::Collective::all_gather;
    digests = collective.digests;
    return -1;
  }
};

/// A layer of gather-states that moves nothing, and a run of it.
class GatherStatesTest : public ::testing::Test {
 protected:
  Notes notes;
  OneOfTwo world;
  Options options{.dtypes = {.compute = fp32}, .limits = {.max_tokens = 2}};

  std::unique_ptr<Strategy> layer() {
    kernels::AttendParams bounds;
    bounds.tokens = options.limits.max_tokens;
    bounds.head_dim = bounds.value_dim = options.head_dim;
    const StrategyInfo& info =
        choose_strategy(options, world.size(), built_in_machine(Device::host));
    auto made = entry_of(info).make({options, notes, world, bounds});
    made->open(0);
    return made;
  }
  void run(Strategy& layer, std::int64_t tokens = 2, bool timed = false,
           std::uint64_t* digests = nullptr) {
    const AttentionArgs args;
    const RunArrays arrays;
    kernels::AttendParams rows;
    rows.tokens = tokens;
    const longspan::Run own{
        .args = args, .arrays = arrays, .attend = rows, .timed = timed, .enter = [](Phase) {}};
    Pass pass(own);
    pass.own_digest.hash = 42;
    pass.digests = digests;
    layer.prepare(pass);
    layer.queue(pass);
  }
};

TEST_F(GatherStatesTest, ARankThatTimesItsPhasesSendsWhatTheOthersSend) {
  const auto states = layer();
  run(*states);
  run(*states, 2, true);
  EXPECT_EQ(notes.pushes, 1) << "with times, attention and exchange are kernels of their own";
  ASSERT_EQ(notes.exchanges.size(), 2u);
  for (const kernels::ExchangeParams& exchange : notes.exchanges) {
    EXPECT_FALSE(exchange.apart) << "the variant follows from this";
    EXPECT_EQ(exchange.hash, 42u);
  }
}

TEST_F(GatherStatesTest, AllRanksTakeKernelsApartTogether) {
  options.exchange = Exchange::peer_buffers_apart;
  run(*layer());
  ASSERT_EQ(notes.exchanges.size(), 1u);
  EXPECT_EQ(notes.pushes, 0);
  EXPECT_TRUE(notes.exchanges[0].apart);
}

TEST_F(GatherStatesTest, WhatIsGatheredCarriesWhatTheRankMeans) {
  options.exchange = Exchange::gather;
  std::uint64_t words[2] = {};
  run(*layer(), 2, false, words);
  EXPECT_EQ(notes.digests_written, 1);
  EXPECT_EQ(world.gathers, 1);
  EXPECT_EQ(world.digests, words);
  EXPECT_EQ(notes.merges, 1);
}

TEST_F(GatherStatesTest, TakesPeerBuffersWhereTheStatesFit) {
  options.limits.max_tokens = 16385;
  const auto states = layer();
  EXPECT_EQ(states->exchange().describe(), "peer-buffers (gather past 16384 states)");
  run(*states, 16385);
  EXPECT_TRUE(notes.exchanges.empty());
  EXPECT_EQ(world.gathers, 1);
  run(*states, 16384);
  EXPECT_EQ(notes.exchanges.size(), 1u);
  EXPECT_EQ(world.gathers, 1);
}

TEST_F(GatherStatesTest, QueuesNoExchangeOnACommunicatorThatHasFailed) {
  const auto states = layer();
  world.abort("k.npy is truncated");
  EXPECT_THROW(run(*states), RankError);
  EXPECT_TRUE(notes.exchanges.empty());
  EXPECT_EQ(notes.pushes, 0);
}

TEST(RunHeaders, OneWordHasTheRunAndTheRank) {
  const std::uint64_t digests[] = {7, 7, 9};
  const kernels::RunHeaders headers{digests, 1, 3};
  EXPECT_EQ(headers.differing(), 2);
  EXPECT_EQ((kernels::RunHeaders{digests, 1, 2}.differing()), -1);
  const std::uint64_t word = kernels::RunHeaders::reported(5, 2);
  EXPECT_EQ(word >> 32, 5u);
  EXPECT_EQ(static_cast<int>(word & 0xffffffffu) - 1, 2);
  EXPECT_NE(kernels::RunHeaders::reported(0, 0), 0u) << "0 says that all is well";
}

}  // namespace
}  // namespace longspan
