// The host's preparations for the kernels of an exchange: division by a product, the ranks' places
// in the tree, and the owners of rows.
#include "kernels/cuda/exchange/exchange_route.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <random>
#include <vector>

namespace longspan::kernels::cuda {
namespace {

TEST(ExchangeRoute, DivisorDivides) {
  constexpr std::uint32_t kMost = 0x7fffffff;
  const auto check = [](std::uint32_t n, std::uint32_t d) {
    ASSERT_EQ(Divisor(d)(n), n / d) << n << " / " << d;
  };
  for (std::uint32_t d = 1; d < 300; ++d)
    for (std::uint32_t n = 0; n < 1000; ++n) check(n, d);
  std::mt19937 random(1);
  for (int i = 0; i < 200000; ++i) {
    const auto d = std::max(1u, static_cast<std::uint32_t>(kMost & (random() >> random() % 31)));
    const auto n = static_cast<std::uint32_t>(kMost & random()), whole = n / d * d;
    for (const std::uint32_t one : {n, whole, whole - (whole > 0), kMost}) check(one, d);
  }
}

class Routes : public ::testing::TestWithParam<int> {
 protected:
  static constexpr std::int64_t kCapacity = 100;

  ExchangeRoute route(int rank, std::int64_t rows, bool interleaved) {
    ExchangeParams p;
    p.capacity = kCapacity;
    p.peers.rank = rank;
    p.peers.ranks = GetParam();
    for (int of = 0; of < GetParam(); ++of) p.peers.peer_buffer[of] = memory_[of].data();
    p.merge.states = {states_.data(), rows, 16, GetParam()};
    p.merge.interleaved = interleaved;
    return make_route(p);
  }

  std::array<std::array<std::byte, 1>, PeerView::kMostRanks> memory_{};
  std::array<std::byte, 1> states_{};
};

TEST_P(Routes, EveryRankHasItsPlaceInTheTree) {
  const int ranks = GetParam(), levels = log2_ceil(ranks);
  for (const bool interleaved : {false, true})
    for (int rank = 0; rank < ranks; ++rank) {
      const ExchangeRoute r = route(rank, 10, interleaved);
      for (int place = 0; place < 1 << levels; ++place) {
        const int slot = interleaved ? reverse_bits(place, levels) : place;
        EXPECT_EQ(r.empty_places >> place & 1, slot >= ranks ? 1u : 0u);
        EXPECT_EQ(r.peer_places >> place & 1, slot < ranks && slot != rank ? 1u : 0u);
        if (slot >= ranks || slot == rank) continue;
        EXPECT_EQ(r.place_rank[place], slot);
        // That rank pushes to the place that we read.
        EXPECT_EQ(r.place[place] - r.own, r.copies + route(slot, 10, interleaved).slot);
      }
    }
}

TEST_P(Routes, SharesAreAllRowsOnce) {
  const int ranks = GetParam();
  for (std::int64_t rows = 1; rows <= kCapacity; ++rows) {
    std::vector<int> times(static_cast<std::size_t>(rows));
    for (int rank = 0; rank < ranks; ++rank) {
      const ExchangeRoute r = route(rank, rows, false);
      ASSERT_LE(r.own_count, r.share_count_most);
      for (std::uint32_t i = 0; i < r.own_count; ++i) ++times.at(r.own_first + i);
      for (std::uint32_t step = 0; step < ExchangeRoute::kMostPeers; ++step) {
        if (step >= r.peers) {
          ASSERT_EQ(r.share_count[step], 0u);
          continue;
        }
        const ExchangeRoute peer = route(r.rank[step], rows, false);
        ASSERT_EQ(r.peer_buffer[step], peer.own);
        ASSERT_EQ(r.share_first[step], peer.own_first);
        ASSERT_EQ(r.share_count[step], peer.own_count);
      }
    }
    ASSERT_EQ(std::count(times.begin(), times.end(), 1), rows);
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, Routes, ::testing::Values(2, 3, 4, 5, 7, 8));

}  // namespace
}  // namespace longspan::kernels::cuda
