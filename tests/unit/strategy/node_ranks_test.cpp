// The keys of a node's ranks together are one rank's share among the nodes: for every rule, number
// of nodes, ranks of a node, and length.
#include "src/strategy/shared/node_ranks.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/control/hosts.hpp"

namespace longspan {
namespace {

TEST(NodeRanks, HoldTogetherOneShareAmongTheNodes) {
  for (const Sharding& rule :
       {Sharding{Layout::contiguous}, Sharding{Layout::zigzag}, Sharding{Layout::striped},
        Sharding{Layout::interleaved, 1}, Sharding{Layout::interleaved, 16},
        Sharding{Layout::interleaved, 128}})
    for (int nodes = 2; nodes <= 5; ++nodes)
      for (int per_node = 1; per_node <= 4; ++per_node)
        for (const std::int64_t length : {0, 1, 2, 5, 17, 127, 128, 129, 500, 1000, 2049}) {
          SCOPED_TRACE(std::string(name(rule.layout)) + " " + std::to_string(nodes) + " nodes of " +
                       std::to_string(per_node) + ", length " + std::to_string(length));
          const int ranks = nodes * per_node;
          for (int node = 0; node < nodes; ++node) {
            const NodeRanks own = NodeRanks::of(node * per_node + per_node - 1, ranks, per_node);
            ASSERT_EQ(own.first, node * per_node);
            ASSERT_EQ(own.node(), node);
            std::vector<std::int64_t> held, expected;
            for (int rank = own.first; rank < own.first + own.count; ++rank) {
              const Shard shard = rule.resolve(length, rank, ranks);
              for (std::int64_t i = 0; i < shard.local_len(length); ++i)
                held.push_back(shard.position(i, length));
            }
            std::sort(held.begin(), held.end());
            const Shard part = part_of_node(rule.resolve(length, own.first, ranks), own);
            for (std::int64_t i = 0; i < part.local_len(length); ++i)
              expected.push_back(part.position(i, length));
            ASSERT_EQ(held, expected);
            for (std::size_t i = 0; i < held.size(); ++i)
              ASSERT_EQ(part.before(held[i], length), static_cast<std::int64_t>(i));
          }
        }
}

TEST(NodeRanks, OfOneNodeHaveTheWholeSequenceInItsOwnOrder) {
  const Shard part = part_of_node(Shard::interleaved(300, 1, 4, 16), NodeRanks::all(4));
  EXPECT_EQ(part.local_len(300), 300);
  EXPECT_EQ(part.layout, Layout::contiguous);  // whose order of folding is that of one rank alone
}

TEST(NodeRanks, AreThoseOfAMachineWhereAllHaveAsManySideBySide) {
  using comm::even_nodes;
  EXPECT_EQ(even_nodes({"a"}), 1);
  EXPECT_EQ(even_nodes({"a", "a", "a"}), 3);
  EXPECT_EQ(even_nodes({"a", "a", "b", "b", "c", "c"}), 2);
  EXPECT_EQ(even_nodes({"a", "b", "c"}), 1);
  EXPECT_EQ(even_nodes({"a", "b", "a", "b"}), 0);
  EXPECT_EQ(even_nodes({"a", "a", "b"}), 0);
  EXPECT_EQ(even_nodes({"a", "b", "b"}), 0);
  EXPECT_EQ(even_nodes({"a", "a", "b", "b", "b", "b"}), 0);
  EXPECT_EQ(even_nodes({"a", "a", "b", "c"}), 0);
  EXPECT_EQ(even_nodes({"a", "a", "b", "b", "a", "a"}), 0);
}

}  // namespace
}  // namespace longspan
