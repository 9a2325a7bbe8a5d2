// The fixed order, against the contract's own words: which segments meet in which merge must not
// depend on the number of ranks. A state is a text, and merging writes brackets.
#include "longspan/order.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "longspan/shard.hpp"

namespace longspan {
namespace {

/// Commutative, and empty is the identity: as the algebra.
std::string merge(const std::string& a, const std::string& b) {
  if (a.empty() || b.empty()) return a + b;
  return a < b ? "(" + a + b + ")" : "(" + b + a + ")";
}

/// A binary tree over the leaves, neighbours first, padded to a power of two.
std::string tree(std::vector<std::string> nodes) {
  while (nodes.size() > 1) {
    if (nodes.size() % 2) nodes.push_back("");
    for (std::size_t i = 0; i < nodes.size() / 2; ++i)
      nodes[i] = merge(nodes[2 * i], nodes[2 * i + 1]);
    nodes.resize(nodes.size() / 2);
  }
  return nodes.empty() ? "" : nodes[0];
}

/// Contract 5, word by word.
std::string by_contract(std::int64_t n, std::int64_t unit) {
  std::vector<std::vector<std::string>> own(kVirtualRanks);
  for (std::int64_t i = 0; i < n; ++i) {
    int v = 0;
    if (unit > 0) {
      v = static_cast<int>(i / unit % kVirtualRanks);
    } else {
      while (n * (v + 1) / kVirtualRanks <= i) ++v;
    }
    own[v].push_back(std::to_string(i) + ",");
  }
  std::vector<std::string> states;
  for (const auto& segments : own) states.push_back(tree(segments));
  const bool interleaved = unit > 0;
  for (int distance = interleaved ? 32 : 1; distance >= 1 && distance <= 32;
       distance = interleaved ? distance / 2 : distance * 2) {
    for (int v = 0; v < kVirtualRanks; ++v)
      if ((v & distance) == 0) states[v] = merge(states[v], states[v + distance]);
  }
  return states[0];
}

/// The work of ranks: each folds its leaves, then the gathered states fold by place.
std::string by_ranks(std::int64_t keys, int ranks, std::int64_t unit) {
  std::vector<std::string> gathered(std::size_t{1} << log2_ceil(ranks));
  for (int r = 0; r < ranks; ++r) {
    const Shard shard = unit > 0 ? Shard::interleaved(keys, r, ranks, unit * kSegment)
                                 : Shard::contiguous(keys, r, ranks);
    const SegmentOrder order = shard.order(keys);
    std::vector<std::string> leaves;
    for (int j = 0; j < order.leaves; ++j) {
      std::vector<std::string> segments;
      for (std::int64_t t = 0; t < order.count(j); ++t) {
        const std::int64_t first = shard.position(order.segment(j, t) * kSegment, keys);
        EXPECT_EQ(first % kSegment, 0);
        segments.push_back(std::to_string(first / kSegment) + ",");
      }
      leaves.push_back(tree(segments));
    }
    gathered[fold_place(r, ranks, unit > 0)] = tree(leaves);
  }
  return tree(gathered);
}

TEST(Order, RanksThatDivide64FoldOneTree) {
  for (std::int64_t keys : {1, 127, 128, 129, 4097, 5000, 8192, 20000, 131073})
    for (std::int64_t unit : {0, 1, 2, 5})
      for (int ranks : {1, 2, 4, 8, 16, 32, 64})
        EXPECT_EQ(by_ranks(keys, ranks, unit), by_contract(segments_of(keys), unit))
            << keys << " keys, " << ranks << " ranks, unit " << unit;
}

TEST(Order, OtherRankCountsFoldEverySegmentOnce) {
  for (int ranks : {3, 5, 7})
    for (std::int64_t unit : {0, 1}) {
      std::string text = by_ranks(20000, ranks, unit);
      EXPECT_EQ(std::count(text.begin(), text.end(), ','), segments_of(20000));
    }
}

TEST(Order, ReversedBits) {
  EXPECT_EQ(reverse_bits(0b001, 3), 0b100);
  EXPECT_EQ(reverse_bits(0b110, 3), 0b011);
  EXPECT_EQ(reverse_bits(0, 0), 0);
}

}  // namespace
}  // namespace longspan
