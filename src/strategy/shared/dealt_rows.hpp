// Query rows that are distributed over ranks and used on all of them: a map of which rank has
// which, and the rows themselves, gathered and brought into the order of the whole q. Strategies
// that attend with all rows share this.
//
//     my rows  ->  [ranks, capacity] rows, as received  ->  [tokens] rows, in order
#pragma once

#include "src/strategy/shared/node_ranks.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {

/// The most rows of the result that one rank handles, if the work is shared by rows: of a whole
/// result an even share. For a rule it knows the number; a table may give all rows to one rank.
double most_result_rows(const Options& options, int ranks, const RunSize& size);

class DealtRows {
 public:
  /// The distributed rows: the rows of sharded queries, which are gathered; with replicated
  /// queries, the rows of the result (Options::results), or none.
  explicit DealtRows(const LayerContext& layer)
      : DealtRows(layer, NodeRanks::all(layer.comm.size())) {}
  /// The same, with a map of only a node's rows, for strategies that call make_map and gather rows
  /// by other means.
  DealtRows(const LayerContext& layer, const NodeRanks& mapped) : layer_(layer), mapped_(mapped) {}

  /// Takes memory for the map only.
  void lay_out_map(Parts& memory);
  /// Queues the map.
  void make_map(const Pass& pass) const;

  bool are_gathered() const { return layer_.options.queries.has_value(); }
  bool are_dealt() const {
    return are_gathered() || layer_.options.results.part == ResultPart::rows;
  }
  /// The most rows of a run, on all ranks together.
  std::int64_t most_tokens() const {
    return layer_.options.limits.max_tokens * (are_gathered() ? layer_.comm.size() : 1);
  }
  /// The most rows of one rank in any run of the layer.
  std::int64_t most_capacity() const;
  /// The rows that rank `rank` has in a run, as far as every rank knows: on a GPU a bound for
  /// batches, whose lengths are in GPU memory, and always a bound for listed rows.
  std::int64_t rows_of(const Run& run, int rank) const;
  /// The same for the rows of this rank's node.
  std::int64_t rows_of_node(const Run& run) const;
  /// The same for the most rows of any rank.
  std::int64_t capacity(const Run& run) const;

  void lay_out(Parts& memory);
  /// Points the attention of a pass at all rows, once they are gathered.
  void prepare(Pass& pass) const;
  /// Queues the map and, with sharded queries, gathers every rank's rows.
  void gather(const Pass& pass) const;

  /// [ranks, capacity] the index of each rank's rows in the whole q, or in a node's part of it; -1
  /// past its last.
  const std::int64_t* map() const { return map_; }
  /// [capacity] this rank's part of the map.
  const std::int64_t* own_map(const Run& run) const {
    return map_ + (layer_.comm.rank() - mapped_.first) * capacity(run);
  }
  /// The bytes of a row of queries, [heads, dim].
  std::int64_t row_bytes() const;

 private:
  const Sharding& rule() const {
    return are_gathered() ? *layer_.options.queries : layer_.options.results.rows;
  }
  bool are_counted(const Run& run) const;

  LayerContext layer_;
  NodeRanks mapped_;
  std::byte* gathered_ = nullptr;  // [ranks, capacity, row_bytes]
  std::byte* ordered_ = nullptr;   // [tokens, row_bytes]
  std::int64_t* map_ = nullptr;
  std::int32_t* part_start_ = nullptr;  // [batch + 1] of a node's rows
};

}  // namespace longspan
