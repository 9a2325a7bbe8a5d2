// The exchange with which ranks share work by heads: all ranks of a layer, or those of a node.
//
//     my rows of q, k, v, all heads  ->  all rows, my heads  ->  an attention  ->  my rows, all
//     heads
//
// Three all-to-alls bring queries, keys and values, and one returns finished rows. Replicated
// queries need not travel: results by heads are then complete at once, and whole results are
// gathered. If the ranks are those of a node, "all rows" are those that the node has.
#pragma once

#include <functional>
#include <string>

#include "longspan/storage.hpp"
#include "src/strategy/route.hpp"
#include "src/strategy/shared/dealt_rows.hpp"
#include "src/strategy/shared/finished_rows.hpp"
#include "src/strategy/shared/head_shares.hpp"
#include "src/strategy/shared/node_ranks.hpp"
#include "src/strategy/shared/travelling_keys.hpp"
#include "src/strategy/shared/walk.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {

class HeadExchange {
 public:
  /// A row's term of backward (kernels::RowTerm) travels as so many fp32.
  static constexpr int kTermFloats = sizeof(kernels::RowTerm) / sizeof(float);

  /// Among `ranks` of the layer, which `comm` connects.
  HeadExchange(const LayerContext& layer, const NodeRanks& ranks, comm::Transport& comm);

  /// The most query rows of its attention, and the most keys of a sequence.
  std::int64_t most_tokens() const { return own_layer_.bounds.tokens; }
  /// The heads of this rank.
  const HeadShare& share() const { return share_; }

  /// Takes memory for whole sequences of the most heads of any rank. The layout is the same on all
  /// ranks, so that ranks can put rows into each other's memory.
  void lay_out_whole(Parts& memory);
  /// Takes the remaining memory, and that for whole sequences if it has not been laid out.
  void lay_out(Parts& memory);

  /// Describes the run to its checks, as one of all rows. Throws Unsupported and InputError, on
  /// every rank, for a run that cannot be shared by heads.
  void prepare(Pass& pass, const char* strategy) const;

  /// Queues a run: receives rows and keys, points the attention at this rank's heads, calls
  /// attend(), and sends finished rows to their owners. attend() must end in the result that the
  /// pass then asks for: rows in the send buffer, unless the rank gets only these heads.
  void queue(Pass& pass, const std::function<void()>& attend);

  // The parts of queue(), for strategies that bring rows and keys by other means (head_puts.hpp),
  // and for backward (head_gradients.hpp).

  /// Queues the write of new keys, and a copy of this rank's keys if they cannot be sent in place.
  /// Returns them, with all kv heads.
  KeyBlock ready_keys(Pass& pass) const;
  /// Queues the computation of which rank has which rows and keys.
  void find_places(const Pass& pass) const;
  /// Receives all rows of this rank's heads into `to` [tokens, own heads, dim], in the order of the
  /// whole q, or of the node's part of it. `from` has this rank's rows, all heads.
  void exchange_rows(const Pass& pass, const kernels::TokenRows& from, int dim, DType dtype,
                     std::byte* to, const char* step) const;
  /// The same for the queries.
  void exchange_queries(const Pass& pass) const;
  /// Receives all keys (i = 0), or values, of this rank's kv heads, in the order of whole
  /// sequences, or of the node's part of them. `own` are this rank's, with all kv heads.
  void exchange_keys(const Pass& pass, const KeyBlock& own, int i) const;
  /// [ranks] slots of `slot` bytes that leave, and that all_to_all receives.
  std::byte* leaving() const { return leaving_; }
  std::byte* arriving() const { return arriving_; }
  void all_to_all(const Pass& pass, std::int64_t slot, const char* step) const;
  /// Gathers such slots, of which this rank's lies at its place in arriving().
  void gather(const Pass& pass, std::int64_t slot, const char* step) const;
  /// The bytes of such a slot, which has room for the most heads of any rank: of rows, and of fp32
  /// sums of keys (kernels::GradientSums).
  std::int64_t row_slot(std::int64_t rows, int dim, DType dtype) const;
  std::int64_t key_sum_slot(std::int64_t rows, int dim) const;
  /// The most keys of any rank in a run.
  std::int64_t most_keys(const Run& run) const;
  /// Which rank has which rows, and how many keys.
  const DealtRows& rows() const { return rows_; }
  const TravellingKeys& keys() const { return keys_; }
  /// The layer as the attention of this rank's heads sees it.
  const LayerContext& own_layer() const { return own_layer_; }
  /// The ranks of the exchange, and this one's number among them.
  const NodeRanks& ranks() const { return ranks_; }
  int peers() const { return comm_.size(); }
  int peer() const { return comm_.rank(); }
  /// Points the attention at some of this rank's heads over whole sequences.
  void attend_to(Pass& pass, const HeadShare& heads) const;
  /// The same for all of its heads, over the node's part of sequences if there are several nodes.
  void attend_to_own(Pass& pass) const;
  /// Whole sequences of this rank's heads, [tokens, own heads, head_dim] and so on.
  std::byte* whole_queries() const { return queries_; }
  const KeyBlock& whole_keys() const { return ordered_; }
  /// Memory for the finished rows of all of them.
  std::byte* finished_rows() const { return finished_; }
  /// Finished rows of the heads of one rank; slots have the size for the most heads.
  FinishedSlot finished(std::int64_t rows, int peer) const;
  HeadShare share_of(int peer) const {
    return head_share(layer_.bounds.heads, layer_.bounds.kv_heads, peer, peers());
  }

 private:
  class Forward;

  bool by_heads() const { return layer_.options.results.part == ResultPart::heads; }
  StorageFormat key_format() const { return storage_of(layer_.bounds.kv_dtype); }
  /// The elements of a row of keys, or of values.
  int elements_of(int i) const {
    return key_format().row_elements(i == 0 ? layer_.bounds.head_dim : layer_.bounds.value_dim);
  }

  // Bytes from one rank to another: equal ones, for the most heads.
  std::int64_t query_slot(std::int64_t rows) const;
  std::int64_t gradient_slot() const;
  std::int64_t key_slot(std::int64_t rows, int i) const;
  std::int64_t finished_slot(std::int64_t rows) const;
  std::int64_t most_finished_bytes() const;

  void pack_heads(const Run& run, const kernels::TokenRows& from, std::int64_t rows, int dim,
                  DType dtype, HeadRange HeadShare::*range, std::int64_t slot) const;
  void find_starts(const Run& run) const;
  void make_own(Pass& pass) const;
  void take_back(const Pass& pass, const kernels::MergeParams& asked) const;
  void take_rows_of_node(Pass& pass) const;
  void point_at_finished(Pass& pass) const;
  void return_rows(const Pass& pass, const kernels::MergeParams& asked) const;
  void gather_heads(const Pass& pass, const kernels::MergeParams& asked) const;
  void put(kernels::PackOutputsParams place, int peer, const kernels::MergeParams& asked,
           Stream stream) const;
  std::int64_t* starts_of(int peer) const {
    return starts_ + std::int64_t{peer} * layer_.bounds.batch.size;
  }

  LayerContext layer_;
  NodeRanks ranks_;
  comm::Transport& comm_;
  HeadShare share_;
  MostHeads most_;
  DealtRows rows_;
  LayerContext own_layer_;          // the layer as the attention of this rank's heads sees it
  TravellingKeys keys_, own_keys_;  // with all kv heads; with this rank's
  std::byte* leaving_ = nullptr;    // [peers] slots of rows, or finished rows
  std::byte* arriving_ = nullptr;   // [peers] slots of rows, or finished rows
  std::byte* queries_ = nullptr;    // [tokens, own heads, head_dim], with sharded queries
  std::byte* finished_ = nullptr;   // FinishedSlot of all rows, in the memory of arriving_
  KeyBlock copied_;                 // this rank's keys, all kv heads, if they must be copied
  std::int64_t* starts_ = nullptr;  // [peers, batch] first row of each sequence of a rank's keys
  Route route_;
  Underway underway_;
  KeyBlock ordered_;  // whole sequences, or a node's part of them, own kv heads
};

/// Why `ranks` ranks cannot share the work of such a layer by heads; empty if they can.
std::string refuse_head_exchange(const Options& options, int ranks);

/// The cost of the exchange among `ranks`; `size` is what they have together.
RunCost head_exchange_cost(const Options& options, int ranks, const RunSize& size);

}  // namespace longspan
