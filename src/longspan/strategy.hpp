/// \file
/// How states, queries or keys travel between ranks. One row a strategy: the same table feeds
/// `longspan run --list-strategies`, the documentation, and the choice made by "auto", which is the
/// first row that serves such a layer.
#pragma once

#include <span>
#include <string>

namespace longspan {

struct Options;

/// What a strategy asks of a rank, gives it, and costs.
struct StrategyInfo {
  const char* name;      ///< as Options::strategy takes it
  const char* queries;   ///< what a rank must hold
  const char* result;    ///< what a rank gets
  const char* received;  ///< bytes received per rank; P ranks, T query rows, S keys, b bytes of a
                         ///< key's element
};

/// Every strategy of this build, in the order of preference.
std::span<const StrategyInfo> strategies();

/// The size of a run, counted in doubles so that no size overflows.
struct RunSize {
  double tokens = 0;       ///< query rows, of all sequences and ranks
  double most_tokens = 0;  ///< with sharded queries: most of them on one rank
  double keys = 0;         ///< of all sequences, on all ranks
};

/// What a run of that size takes on each rank.
struct RunCost {
  double received_bytes = 0;    ///< from the other ranks
  double workspace_bytes = 0;   ///< of the layer, but for the scratch of its kernels
  double overlapped_bytes = 0;  ///< of received_bytes, what travels while the rank computes
  double messages = 0;          ///< transfers that wait for one another: each costs a latency
  double work = 1;              ///< of the whole attention, the part that a rank computes where
                                ///< rows and keys are dealt evenly
};

/// The cost by the strategy that choose_strategy takes; throws as that does.
RunCost cost_of(const Options& options, int ranks, const RunSize& size);

/// The strategy that `options.strategy` names, "auto" resolved. Throws Unsupported, with the known
/// names, for any other; and, with the reason and the strategies that could, for one that cannot
/// serve such a layer.
const StrategyInfo& choose_strategy(const Options& options, int ranks);

}  // namespace longspan
