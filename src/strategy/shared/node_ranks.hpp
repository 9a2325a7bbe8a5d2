// Strategies of two levels: the ranks of a layer are nodes of neighbours, `per_node` of them each.
// What the ranks of a node hold of a sequence, together and in its order, is the share of one rank
// among as many as there are nodes, by a rule of the same kind.
#pragma once

#include "longspan/options.hpp"
#include "longspan/shard.hpp"

namespace longspan {

/// The ranks of one node among all ranks of a layer.
struct NodeRanks {
  int first = 0;  // of this node
  int count = 1;  // of every node
  int nodes = 1;

  static NodeRanks all(int ranks) { return {0, ranks, 1}; }
  static NodeRanks of(int rank, int ranks, int per_node) {
    return {rank / per_node * per_node, per_node, ranks / per_node};
  }
  int node() const { return first / count; }
};

/// The rule by which nodes share what ranks share by `rule`, which is not by a table. Even cuts of
/// a sequence in n * m parts are those in m parts and some between them, so that contiguous and
/// zigzag stay what they are; blocks that are dealt out in turn are as large as those of a node in
/// a row.
constexpr Sharding of_nodes(const Sharding& rule, int per_node) {
  switch (rule.layout) {
    case Layout::striped:
      return {Layout::interleaved, per_node};
    case Layout::interleaved:
      return {Layout::interleaved, rule.block * per_node};
    default:
      return rule;
  }
}

/// What the ranks of a node hold together of a sequence that is dealt out by a rule: all of it
/// where there is one node.
inline Shard part_of_node(const Shard& dealt, const NodeRanks& ranks) {
  if (ranks.nodes == 1) return {.length = dealt.length};
  const Sharding rule = of_nodes({dealt.layout, dealt.block}, ranks.count);
  return {rule.layout, ranks.node(), ranks.nodes, dealt.length, rule.block};
}

}  // namespace longspan
