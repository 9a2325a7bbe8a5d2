// The protocol of the exchange kernels (kernels/cuda/exchange/exchange.cu) on CPU threads: ranks
// that push words into each other's peer buffers, where the words are their own flags, in one trip
// and in two, and without a barrier. It shows that copies of each buffer are enough, and that one
// is not. exchange_test tries the kernels themselves on GPUs.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <random>
#include <thread>
#include <vector>

#include "kernels/cuda/exchange/peer_buffer_layout.hpp"
#include "tests/support/fresh_seed.hpp"

namespace longspan {
namespace {

using kernels::cuda::next_epoch;

constexpr int kRanks = 4;
constexpr int kBlocks = 2;
constexpr int kWords = 3;  // of a block's data
constexpr int kMostCopies = 3;

enum class Way { one_trip, two_trips };
constexpr Way kWays[] = {Way::one_trip, Way::two_trips};

/// A peer buffer: words by copy, sender, block, 0 at rest. All is relaxed, as the kernel's plain
/// stores are. The header, a word by copy and sender, comes from every rank to every other in each
/// exchange, with any data.
struct PeerBuffer {
  using Words = std::atomic<std::uint32_t>[kMostCopies][kRanks][kBlocks][kWords];
  Words states, results;
  std::atomic<std::uint32_t> header[kMostCopies][kRanks];
};

/// The message of rank `rank` in an exchange.
std::uint32_t word_of(int rank, int block, int i, std::uint32_t epoch) {
  return epoch * 2654435761u + static_cast<std::uint32_t>(rank * 1009 + block * 101 + i);
}

/// Rank 0 is slow: it reads the headers, and resets the words that it has read, only after the next
/// exchange has overtaken it, or after `slow` checks for that. No wait is longer than `patience`.
class Model {
 public:
  Model(int copies, std::uint32_t first_epoch, int slow = 20,
        std::chrono::seconds patience = std::chrono::seconds(60))
      : copies_(copies),
        first_(first_epoch),
        slow_(slow),
        patience_(patience),
        peer_buffers_(kRanks) {}

  /// The number of wrong words that were read in this many exchanges, in the given ways in turn.
  long run(int exchanges, const std::vector<Way>& ways) {
    std::atomic<long> wrong{0};
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < kRanks; ++rank)
      ranks.emplace_back([&, rank] {
        std::mt19937 random(tests::fresh_seed());
        std::uint32_t epoch = first_;
        for (int e = 0; e < exchanges; ++e) {
          epoch = next_epoch(epoch);
          const Way way = ways[static_cast<std::size_t>(e) % ways.size()];
          // Blocks of a kernel run in any order; the next kernel starts when all have ended.
          std::vector<std::thread> blocks;
          blocks.emplace_back([&, epoch] { headers(rank, epoch); });
          for (int block = 0; block < kBlocks; ++block)
            blocks.emplace_back([&, block, way, epoch, pause = random() % 3] {
              for (unsigned p = 0; p < pause; ++p) std::this_thread::yield();
              wrong += way == Way::one_trip ? one_trip(rank, block, epoch)
                                            : two_trips(rank, block, epoch);
            });
          for (std::thread& block : blocks) block.join();
        }
      });
    for (std::thread& rank : ranks) rank.join();
    return wrong;
  }

 private:
  unsigned copy_of(std::uint32_t epoch) const { return epoch % static_cast<unsigned>(copies_); }

  /// A word is never 0 on its way.
  static std::uint32_t sent(std::uint32_t word) { return word == ~0u ? 0x80000000u : ~word; }

  void headers(int rank, std::uint32_t epoch) {
    for (int to = 0; to < kRanks; ++to)
      if (to != rank)
        peer_buffers_[to].header[copy_of(epoch)][rank].store(epoch, std::memory_order_relaxed);
    for (int from = 0; from < kRanks; ++from)
      if (from != rank)
        wait([&, &word = peer_buffers_[rank].header[copy_of(epoch)][from]] {
          const auto seen = [&] { return word.load(std::memory_order_relaxed); };
          dawdle(rank, [&] { return seen() == next_epoch(epoch); });
          return seen() == epoch;
        });
  }

  void push(PeerBuffer::Words& words, int rank, int block, std::uint32_t epoch) {
    for (int i = 0; i < kWords; ++i)
      words[copy_of(epoch)][rank][block][i].store(sent(word_of(rank, block, i, epoch)),
                                                  std::memory_order_relaxed);
  }

  /// Waits for the words of a rank in a peer buffer of `rank`, and resets them; returns how many
  /// are wrong.
  long take(PeerBuffer::Words& words, int rank, int from, int block, std::uint32_t epoch) {
    long wrong = 0;
    for (int i = 0; i < kWords; ++i) {
      auto& word = words[copy_of(epoch)][from][block][i];
      std::uint32_t bits = 0;
      wait([&] { return (bits = word.load(std::memory_order_relaxed)) != 0; });
      wrong += bits != sent(word_of(from, block, i, epoch));
      // With one copy it may be reset after the next one has come.
      dawdle(rank, [&] { return word.load(std::memory_order_relaxed) != bits; });
      word.store(0, std::memory_order_relaxed);
    }
    return wrong;
  }

  long one_trip(int rank, int block, std::uint32_t epoch) {
    long wrong = 0;
    for (int to = 0; to < kRanks; ++to)
      if (to != rank) push(peer_buffers_[to].states, rank, block, epoch);
    for (int from = 0; from < kRanks; ++from)
      if (from != rank) wrong += take(peer_buffers_[rank].states, rank, from, block, epoch);
    return wrong;
  }

  /// Only the first two ranks have rows: the others get results and no states.
  long two_trips(int rank, int block, std::uint32_t epoch) {
    constexpr int kOwners = 2;
    long wrong = 0;
    for (int to = 0; to < kOwners; ++to)
      if (to != rank) push(peer_buffers_[to].states, rank, block, epoch);
    if (rank < kOwners) {
      for (int from = 0; from < kRanks; ++from)
        if (from != rank) wrong += take(peer_buffers_[rank].states, rank, from, block, epoch);
      for (int to = 0; to < kRanks; ++to)
        if (to != rank) push(peer_buffers_[to].results, rank, block, epoch);
    }
    for (int from = 0; from < kOwners; ++from)
      if (from != rank) wrong += take(peer_buffers_[rank].results, rank, from, block, epoch);
    return wrong;
  }

  template <class Overtaken>
  void dawdle(int rank, const Overtaken& overtaken) const {
    std::this_thread::yield();
    for (int looks = 0; rank == 0 && looks < slow_ && !gave_up_ && !overtaken(); ++looks)
      std::this_thread::yield();
  }

  /// Until it has come, or a thread's patience has ended.
  template <class There>
  void wait(const There& there) {
    const auto begin = std::chrono::steady_clock::now();
    while (!there()) {
      if (std::chrono::steady_clock::now() - begin > patience_) gave_up_ = true;
      if (gave_up_) return;
      std::this_thread::yield();
    }
  }

  std::atomic<bool> gave_up_{false};
  const int copies_;
  const std::uint32_t first_;
  const int slow_;
  const std::chrono::seconds patience_;
  std::vector<PeerBuffer> peer_buffers_;
};

TEST(ExchangeProtocol, TwoCopiesAreEnough) {
  for (const Way way : kWays) {
    EXPECT_EQ(Model(2, 0).run(400, {way}), 0);
    EXPECT_EQ(Model(2, 0, 1 << 10).run(10, {way}), 0);  // as slow as the failing one below
  }
}

TEST(ExchangeProtocol, WaysMayAlternate) {
  EXPECT_EQ(Model(2, 0).run(400, {Way::one_trip, Way::two_trips, Way::two_trips}), 0);
}

TEST(ExchangeProtocol, EpochsMayWrap) {
  EXPECT_EQ(Model(kernels::cuda::kCopies, ~std::uint32_t{0} - 100)
                .run(200, {Way::one_trip, Way::two_trips}),
            0);
}

/// A wait does not end for a word that is reset after the next one has come, or for a header that
/// the next one overwrites.
TEST(ExchangeProtocol, OneCopyIsNotEnough) {
  for (const Way way : kWays)
    EXPECT_GT(Model(1, 0, 1 << 20, std::chrono::seconds(2)).run(400, {way}), 0);
}

}  // namespace
}  // namespace longspan
