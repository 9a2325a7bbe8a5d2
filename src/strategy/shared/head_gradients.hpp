// Backward of strategies that share the work by heads, among all ranks or those of a node: rows,
// with their dout and terms, and keys come to the ranks of their heads, as in forward, and the
// gradients return in fp32.
//
//     my rows, all heads  ->  all rows, my heads  ->  gradients(all rows, all keys) of my heads
//     dq  ->  the rank of the row;   dk, dv  ->  the rank of the key
//
// "All" are those of the node if there are several; then the gradients are those of another
// strategy between nodes. Replicated rows do not travel, and the heads of their dq are gathered.
//
// If ranks share a kv head, each has the gradients of its own query heads of the group; the owner
// of a key adds them up, in the order of the ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "src/strategy/shared/gradient_memory.hpp"
#include "src/strategy/shared/head_exchange.hpp"
#include "src/strategy/shared/row_starts.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {

class HeadGradients {
 public:
  /// `exchange` outlives this; its slots have room for gradients (Options::gradients).
  HeadGradients(const LayerContext& layer, const HeadExchange& exchange);

  /// Of the exchange among `ranks` ranks; `size` is what they have together. With the memory of the
  /// sums of their heads, unless another strategy makes these between nodes.
  static double workspace_bytes(const Options& options, int ranks, const RunSize& size,
                                bool several_nodes = false);
  static BackwardCost cost(const Options& options, int ranks, const RunSize& size);
  void lay_out(Parts& memory);

  /// `pass` is as HeadExchange::prepare left it.
  void backward(Pass& pass, const GradientArgs& args) const;

  /// The same with another strategy between nodes: takes gradients of the heads of this rank, from
  /// such a pass (Pass::terms), and from dout [tokens, own heads, value_dim].
  using BetweenNodes = std::function<Gradients(const Pass& pass, const Tensor& dout)>;
  void backward(Pass& pass, const GradientArgs& args, const BetweenNodes& between) const;

 private:
  int heads() const { return exchange_.share().query.size(); }
  int kv_heads() const { return exchange_.share().kv.size(); }

  bool gathers_rows() const { return exchange_.rows().are_gathered(); }
  bool has_nodes() const { return exchange_.ranks().nodes > 1; }

  void bring(Pass& pass, const GradientArgs& args) const;
  void bring_terms(const Pass& pass, const Pass& own) const;
  Tensor dout_of(const Pass& pass, const GradientArgs& args) const;
  Gradients attend(const Pass& pass, const Tensor& dout) const;
  void give_back(const Pass& pass, const GradientArgs& args, const Gradients& gradients) const;
  void return_rows(const Pass& pass, const kernels::GradientSums& sums) const;
  void put_rows(const Run& run, std::int64_t most, std::int64_t slot) const;
  void find_key_map(const Pass& pass) const;
  void return_keys(const Pass& pass, const kernels::GradientSums& sums,
                   const kernels::GradientSums& own, const char* step) const;

  LayerContext layer_;
  const HeadExchange& exchange_;
  RowStarts starts_;
  GradientMemory memory_;  // of this rank's rows and keys, all heads
  // Of all rows and keys, this rank's heads; the sums without nodes:
  std::byte* dout_ = nullptr;          // [tokens, heads, value_dim], room for fp32
  kernels::RowTerm* terms_ = nullptr;  // [tokens, heads]
  std::byte* dq_ = nullptr;            // sums of rows
  std::byte* dk_ = nullptr;            // sums of keys
  std::byte* dv_ = nullptr;            // sums of values
  std::int64_t* key_map_ = nullptr;    // [ranks, keys of a rank] in sequences
};

}  // namespace longspan
