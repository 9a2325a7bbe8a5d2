// Strategies of two levels: the ranks of a layer form nodes of `per_node` neighbours each. Together
// the ranks of a node hold, in order, what one rank would hold among as many ranks as there are
// nodes, by a rule of the same kind.
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

/// The rule by which nodes share a sequence that ranks share by `rule`, which is not a table. Even
/// cuts of a sequence into n * m parts include the cuts into m parts, so contiguous and zigzag stay
/// unchanged. Blocks that are distributed in turn become as large as those of a node together.
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

/// The part of a sequence that the ranks of a node hold together: all of it if there is only one
/// node.
inline Shard part_of_node(const Shard& dealt, const NodeRanks& ranks) {
  if (ranks.nodes == 1) return {.length = dealt.length};
  const Sharding rule = of_nodes({dealt.layout, dealt.block}, ranks.count);
  return {rule.layout, ranks.node(), ranks.nodes, dealt.length, rule.block};
}

}  // namespace longspan
