// Kernels of several ranks, all on one GPU here, that meet by counters (PutFlags): the waits
// between ranks, over several runs.
#include <gmock/gmock.h>

#include <vector>

#include "comm/cuda/stream_flags.hpp"
#include "kernels/row_puts.hpp"
#include "tests/gpu/on_gpu.hpp"
#include "tests/gpu/own_stream.hpp"

namespace longspan::tests {
namespace {

using kernels::RowPuts;
using test::OwnStream;

class MeetingOfRanks : public OnDevice {
 protected:
  static constexpr int kRanks = 3, kPieces = 2;
  static constexpr std::int64_t kRows = 50, kWidth = 64;

  void SetUp() override {
    OnDevice::SetUp();
    if (IsSkipped()) return;
    flags_ = on_device(std::vector<PutFlags>(kRanks));
    done_ = on_device(std::vector<unsigned>(kRanks * RowPuts::kMostPieces, 0));
    std::vector<std::byte> from(kRanks * kRankBytes);
    for (std::byte& byte : from) byte = static_cast<std::byte>(below(255));
    sent_ = from;
    from_ = on_device(from);
    source_ = from_.data();
    place_ = poisoned<std::byte>(kRanks * from.size());
    streams_ = std::vector<OwnStream>(kRanks);
    load_kernels();
  }

  /// CUDA loads a kernel when it is first launched, and the launch may wait for all running
  /// kernels. Where those wait for it in turn, as here with all ranks on one GPU, it must already
  /// be loaded.
  void load_kernels() const {
    const auto alone = on_device(std::vector<PutFlags>(1));
    const auto row = poisoned<std::byte>(2 * kWidth);
    PutRanks nobody{.rank = 0, .ranks = 1};
    nobody.flags[0] = alone.data();
    copy_result(nobody, 1, row.data(), row.data() + kWidth);
    streams_[0].wait();
  }

  PutRanks among(int rank) const {
    PutRanks all{.rank = rank, .ranks = kRanks};
    for (int p = 0; p < kRanks; ++p) all.flags[p] = flags_.data() + p;
    return all;
  }

  /// A rank puts its rows to every rank. By default its kernel leaves room for those of the others,
  /// and does not wait for their rows.
  void put(int rank, bool beside = true) const {
    RowPuts puts;
    puts.beside = beside;
    puts.pieces = kPieces;
    puts.among = among(rank);
    puts.done = done_.data() + rank * RowPuts::kMostPieces;
    for (int to = 0; to < kRanks; ++to)
      puts.add({source_ + rank * kRankBytes, place_.data() + (to * kRanks + rank) * kRankBytes,
                kWidth, kWidth, kWidth, kRows},
               kWidth / kPieces);
    puts.divide();
    backend().put_rows(puts, {streams_[at(rank)]});
  }

  /// The rows that a rank received from all.
  std::vector<std::byte> got(int rank) const {
    const std::vector<std::byte> all = place_.values();
    const auto first = all.begin() + rank * kRanks * kRankBytes;
    return {first, first + kRanks * kRankBytes};
  }

  /// In a simulator a read of memory would wait for the kernels.
  void expect_nothing_there() const {
    if (kSimulated) return;
    EXPECT_THAT(place_.values(), ::testing::Each(std::byte{0xff}));
  }

  /// Copies rows once all ranks have put theirs.
  void copy_result(int rank, std::int64_t tokens, std::byte* from, std::byte* to) const {
    copy_result(among(rank), tokens, from, to);
  }
  void copy_result(const PutRanks& putters, std::int64_t tokens, std::byte* from,
                   std::byte* to) const {
    kernels::PackOutputsParams p;
    p.tokens = tokens;
    p.dim = kWidth / 4;
    p.from = {from, kWidth / 4, 0};
    p.to = {to, kWidth / 4, 0};
    p.putters = putters;
    backend().pack_outputs(p, {streams_[at(putters.rank)]});
  }

  void set(const std::uint64_t& counter, unsigned value, cudaStream_t stream) const {
    comm::queue_flags(
        stream, {{comm::FlagOperation::raise,
                  reinterpret_cast<std::byte*>(const_cast<std::uint64_t*>(&counter)), value}});
  }

  static std::size_t at(int i) { return static_cast<std::size_t>(i); }
  static constexpr std::int64_t kRankBytes = kRows * kWidth;
  DeviceArray<PutFlags> flags_;
  DeviceArray<unsigned> done_;
  std::vector<std::byte> sent_;
  DeviceArray<std::byte> from_, place_;
  std::byte* source_ = nullptr;  // of the rows that are put
  std::vector<OwnStream> streams_;
};

TEST_F(MeetingOfRanks, NothingIsPutBeforeEveryRankHasRoomAndAllIsHereAtTheEnd) {
  for (int run = 1; run <= 3; ++run) {
    SCOPED_TRACE("run " + std::to_string(run));
    place_ = poisoned<std::byte>(kRanks * sent_.size());
    const int last = run % kRanks;
    for (int i = 1; i < kRanks; ++i) put((last + i) % kRanks);
    for (int i = 1; i < kRanks; ++i) streams_[at((last + i) % kRanks)].expect_waits();
    expect_nothing_there();
    put(last, false);
    streams_[at(last)].wait();
    EXPECT_EQ(got(last), sent_);
    for (int rank = 0; rank < kRanks; ++rank) streams_[at(rank)].wait();
    for (int rank = 0; rank < kRanks; ++rank) EXPECT_EQ(got(rank), sent_) << "at rank " << rank;
    for (const PutFlags& flags : flags_.values()) {
      EXPECT_THAT(std::vector(flags.here, flags.here + kRanks),
                  ::testing::Each(run * PutFlags::kRun));
      EXPECT_EQ(flags.runs, run);
    }
  }
}

/// Rows of the last run may still be on their way when a rank is done with it.
TEST_F(MeetingOfRanks, ARankHasRoomOnceAllThatWasPutBeforeIsHere) {
  for (int rank = 0; rank < kRanks; ++rank) put(rank);
  for (const OwnStream& stream : streams_) stream.wait();
  const OwnStream other;
  PutFlags& own = flags_.data()[0];
  set(own.here[1], PutFlags::kRun - 1, other);
  other.wait();
  for (int rank = 0; rank < kRanks; ++rank) put(rank);
  for (const OwnStream& stream : streams_) stream.expect_waits();
  if (!kSimulated) {
    EXPECT_EQ(flags_.values()[1].free[0], 1u);
  }
  set(own.here[1], PutFlags::kRun, other);
  for (const OwnStream& stream : streams_) stream.wait();
  EXPECT_EQ(flags_.values()[1].free[0], 2u);
}

TEST_F(MeetingOfRanks, NoResultIsCopiedBeforeEveryRanksAttentionHasEnded) {
  for (int run = 1; run <= 2; ++run)
    for (const std::int64_t tokens : {kRows, std::int64_t{0}}) {
      for (int rank = 0; rank < kRanks; ++rank) put(rank);
      for (const OwnStream& stream : streams_) stream.wait();
      place_ = poisoned<std::byte>(kRanks * sent_.size());
      const auto copy = [&](int rank, std::int64_t rows) {
        copy_result(rank, rows, from_.data(), place_.data() + rank * kRankBytes);
      };
      copy(0, kRows);
      copy(2, kRows);
      streams_[0].expect_waits();
      streams_[2].expect_waits();
      expect_nothing_there();
      copy(1, tokens);  // a rank without rows reports it too
      for (const OwnStream& stream : streams_) stream.wait();
      const std::vector<std::byte> all = place_.values();
      for (const int rank : {0, 2})
        EXPECT_TRUE(
            std::equal(sent_.begin(), sent_.begin() + kRankBytes, all.begin() + rank * kRankBytes));
    }
}

/// An abort frees what a rank waits for.
TEST_F(MeetingOfRanks, NobodyWaitsForCountersThatAreFreed) {
  put(0);
  streams_[0].expect_waits();
  const OwnStream other;
  PutFlags& own = flags_.data()[0];
  for (int p = 1; p < kRanks; ++p)
    for (std::uint64_t* counter : {own.free + p, own.here + p, own.ended + p})
      comm::queue_flags(other,
                        {{comm::FlagOperation::free, reinterpret_cast<std::byte*>(counter)}});
  copy_result(0, kRows, from_.data(), place_.data());
  streams_[0].wait();
  EXPECT_EQ(flags_.values()[0].runs, 1u);
}

/// Runs without waits on the host between them: none overwrites rows that another rank still reads.
TEST_F(MeetingOfRanks, RunsThatFollowEachOtherKeepApart) {
  constexpr int kRuns = 4;
  const auto of_a_rank = static_cast<std::int64_t>(sent_.size());
  const auto results = poisoned<std::byte>(at(kRuns * kRanks) * sent_.size());
  std::vector<DeviceArray<std::byte>> sources;
  for (int run = 0; run < kRuns; ++run) {
    std::vector<std::byte> from = sent_;
    for (std::byte& byte : from) byte ^= static_cast<std::byte>(run);
    sources.push_back(on_device(from));
  }
  for (int run = 0; run < kRuns; ++run) {
    source_ = sources[at(run)].data();
    for (int rank = 0; rank < kRanks; ++rank) {
      put(rank);
      copy_result(rank, kRanks * kRows, place_.data() + rank * of_a_rank,
                  results.data() + (run * kRanks + rank) * of_a_rank);
    }
  }
  for (const OwnStream& stream : streams_) stream.wait();
  const std::vector<std::byte> found = results.values();
  for (int run = 0; run < kRuns; ++run)
    for (int rank = 0; rank < kRanks; ++rank)
      EXPECT_TRUE(std::equal(sent_.begin(), sent_.end(),
                             found.begin() + (run * kRanks + rank) * of_a_rank,
                             [&](std::byte sent, std::byte got) {
                               return (sent ^ static_cast<std::byte>(run)) == got;
                             }))
          << "run " << run << " at rank " << rank;
}

}  // namespace
}  // namespace longspan::tests
