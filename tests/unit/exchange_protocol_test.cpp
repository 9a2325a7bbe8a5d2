// The protocol of the exchange kernels (kernels/cuda/exchange.cu) on processor threads: ranks that
// push into each other's windows, with flags, with lines that carry the epoch or with words that
// are their own flags, and no barrier anywhere. It shows that copies of each buffer are enough, and
// that one is not. The kernels themselves are tried on GPUs by exchange_test.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <random>
#include <thread>
#include <vector>

#include "kernels/cuda/window_layout.hpp"

namespace longspan {
namespace {

using kernels::cuda::is_reached;
using kernels::cuda::next_epoch;

constexpr int kRanks = 4;
constexpr int kBlocks = 2;
constexpr int kWords = 3;  // of a block's data
constexpr int kMostCopies = 3;

enum class Way { flags, beside, words };
constexpr Way kWays[] = {Way::flags, Way::beside, Way::words};

/// A window: data by copy, sender, block; flags by sender, block. Relaxed where the kernel's
/// stores are plain, so that only the release and the acquire order anything.
struct Window {
  struct Line {
    std::atomic<std::uint64_t> bits{0};  // data and epoch in one, as eight bytes of a line
  };
  std::atomic<std::uint32_t> data[kMostCopies][kRanks][kBlocks][kWords];
  std::atomic<std::uint32_t> words[kMostCopies][kRanks][kBlocks][kWords];  // 0 at rest
  Line line[kMostCopies][kRanks][kBlocks][kWords];
  std::atomic<std::uint32_t> flag[kRanks][kBlocks];
};

/// What rank `rank` says in an exchange.
std::uint32_t word_of(int rank, int block, int i, std::uint32_t epoch) {
  return epoch * 2654435761u + static_cast<std::uint32_t>(rank * 1009 + block * 101 + i);
}

class Model {
 public:
  Model(Way way, int copies, std::uint32_t first_epoch)
      : way_(way), copies_(copies), first_(first_epoch), windows_(kRanks) {
    for (Window& window : windows_)
      for (auto& of_rank : window.flag)
        for (auto& flag : of_rank) flag = first_epoch;
  }

  /// Wrong words that anybody read in so many exchanges, each way in turn with the other.
  long run(int exchanges, bool mixed) {
    std::atomic<long> wrong{0};
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < kRanks; ++rank)
      ranks.emplace_back([&, rank] {
        std::mt19937 random(std::random_device{}());
        std::uint32_t epoch = first_;
        for (int e = 0; e < exchanges; ++e) {
          epoch = next_epoch(epoch);
          const Way way = mixed ? kWays[e % 3] : way_;
          // Blocks of a kernel run in any order; the next kernel starts when all have ended.
          std::array<std::thread, kBlocks> blocks;
          for (int block = 0; block < kBlocks; ++block)
            blocks[block] = std::thread([&, block, way, epoch, pause = random() % 3] {
              for (unsigned p = 0; p < pause; ++p) std::this_thread::yield();
              wrong += way == Way::flags    ? by_flags(rank, block, epoch)
                       : way == Way::beside ? beside(rank, block, epoch)
                                            : by_words(rank, block, epoch);
            });
          for (std::thread& block : blocks) block.join();
        }
      });
    for (std::thread& rank : ranks) rank.join();
    return wrong;
  }

 private:
  unsigned copy_of(std::uint32_t epoch) const { return epoch % static_cast<unsigned>(copies_); }

  long by_flags(int rank, int block, std::uint32_t epoch) {
    for (int to = 0; to < kRanks; ++to) {
      if (to == rank) continue;
      for (int i = 0; i < kWords; ++i)
        windows_[to].data[copy_of(epoch)][rank][block][i].store(word_of(rank, block, i, epoch),
                                                                std::memory_order_relaxed);
      windows_[to].flag[rank][block].store(epoch, std::memory_order_release);
    }
    long wrong = 0;
    Window& mine = windows_[rank];
    for (int from = 0; from < kRanks; ++from) {
      if (from == rank) continue;
      while (!is_reached(mine.flag[from][block].load(std::memory_order_acquire), epoch))
        std::this_thread::yield();
      for (int i = 0; i < kWords; ++i) {
        if (i == 1) std::this_thread::yield();  // a slow reader
        wrong += mine.data[copy_of(epoch)][from][block][i].load(std::memory_order_relaxed) !=
                 word_of(from, block, i, epoch);
      }
    }
    return wrong;
  }

  long beside(int rank, int block, std::uint32_t epoch) {
    for (int to = 0; to < kRanks; ++to)
      for (int i = 0; to != rank && i < kWords; ++i)
        windows_[to].line[copy_of(epoch)][rank][block][i].bits.store(
            std::uint64_t{epoch} << 32 | word_of(rank, block, i, epoch), std::memory_order_relaxed);
    long wrong = 0;
    for (int from = 0; from < kRanks; ++from)
      for (int i = 0; from != rank && i < kWords; ++i) {
        const auto& line = windows_[rank].line[copy_of(epoch)][from][block][i].bits;
        std::uint64_t bits = line.load(std::memory_order_relaxed);
        // With one copy the line may be overwritten before it is read: then stop, and count it.
        for (int looks = 0; bits >> 32 != epoch && looks < kPatience; ++looks) {
          std::this_thread::yield();
          bits = line.load(std::memory_order_relaxed);
        }
        wrong += bits != (std::uint64_t{epoch} << 32 | word_of(from, block, i, epoch));
      }
    return wrong;
  }

  /// A word is never 0 on its way; who has read it puts it back to 0.
  long by_words(int rank, int block, std::uint32_t epoch) {
    const auto sent = [](std::uint32_t word) { return word == ~0u ? 0x80000000u : ~word; };
    for (int to = 0; to < kRanks; ++to)
      for (int i = 0; to != rank && i < kWords; ++i)
        windows_[to].words[copy_of(epoch)][rank][block][i].store(
            sent(word_of(rank, block, i, epoch)), std::memory_order_relaxed);
    long wrong = 0;
    for (int from = 0; from < kRanks; ++from)
      for (int i = 0; from != rank && i < kWords; ++i) {
        auto& word = windows_[rank].words[copy_of(epoch)][from][block][i];
        std::uint32_t bits = word.load(std::memory_order_relaxed);
        for (int looks = 0; bits == 0 && looks < kPatience / 10 && !gave_up_; ++looks) {
          std::this_thread::yield();
          bits = word.load(std::memory_order_relaxed);
        }
        if (bits == 0) gave_up_ = true;  // with one copy: put to rest after the next one had come
        wrong += bits != sent(word_of(from, block, i, epoch));
        std::this_thread::yield();  // a slow reader
        word.store(0, std::memory_order_relaxed);
      }
    return wrong;
  }

  static constexpr int kPatience = 2000000;
  std::atomic<bool> gave_up_{false};
  const Way way_;
  const int copies_;
  const std::uint32_t first_;
  std::vector<Window> windows_;
};

TEST(ExchangeProtocol, TwoCopiesAreEnough) {
  for (const Way way : kWays) {
    Model model(way, 2, 0);
    EXPECT_EQ(model.run(400, false), 0);
  }
}

TEST(ExchangeProtocol, WaysMayAlternate) {
  Model model(Way::flags, 2, 0);
  EXPECT_EQ(model.run(400, true), 0);
}

TEST(ExchangeProtocol, EpochsMayWrap) {
  Model model(Way::flags, kernels::cuda::kCopies, ~std::uint32_t{0} - 100);
  EXPECT_EQ(model.run(200, true), 0);
}

TEST(ExchangeProtocol, OneCopyIsNotEnough) {
  for (const Way way : {Way::flags, Way::words}) {
    long wrong = 0;
    for (int attempt = 0; attempt < 20 && wrong == 0; ++attempt) {
      Model model(way, 1, 0);
      wrong = model.run(400, false);
    }
    EXPECT_GT(wrong, 0);
  }
}

}  // namespace
}  // namespace longspan
