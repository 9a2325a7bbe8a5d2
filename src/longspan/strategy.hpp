/// \file
/// How states, queries or keys travel between ranks. One row a strategy: the same table feeds
/// `longspan run --list-strategies`, the documentation, and the choice made by "auto", which takes
/// the one that is predicted to be fastest.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "longspan/machine.hpp"

namespace longspan {

class Communicator;
struct Options;

/// What a strategy asks of a rank, gives it, and costs.
struct StrategyInfo {
  const char* name;      ///< as Options::strategy takes it
  const char* queries;   ///< what a rank must hold
  const char* result;    ///< what a rank gets
  const char* received;  ///< bytes received per rank; P ranks, T query rows, S keys, b bytes of a
                         ///< key's element
  int levels = 1;        ///< 2: one strategy inside of a node, another between nodes

  /// Whether this node size gives the strategy two levels; 0 is an unknown size.
  bool is_for_nodes_of(int ranks_per_node, int ranks) const {
    return levels == 1 || (ranks_per_node > 1 && ranks_per_node < ranks);
  }
};

/// Every strategy of this build, in the order of preference.
std::span<const StrategyInfo> strategies();

/// The size of one sequence of a run. Its rows stand at its last positions.
struct SequenceSize {
  std::int64_t rows = 0;  ///< of queries, on all ranks
  std::int64_t keys = 0;  ///< on all ranks
};

/// The size of a run, counted in doubles so that no size overflows.
struct RunSize {
  double tokens = 0;                    ///< query rows, of all sequences and ranks
  double most_tokens = 0;               ///< with sharded queries: most of them on one rank
  double keys = 0;                      ///< of all sequences, on all ranks
  double sequences = 1;                 ///< that share these
  std::vector<SequenceSize> each = {};  ///< of packed documents and other sequences that differ,
                                        ///< each dealt out by itself; empty: they are alike
};

/// What a run of that size takes on each rank.
struct RunCost {
  double received_bytes = 0;    ///< from the other ranks
  double workspace_bytes = 0;   ///< of the layer, but for the scratch of its kernels
  double far_bytes = -1;        ///< of received_bytes, what comes from other nodes; below 0: every
                                ///< other rank is heard alike
  double overlapped_bytes = 0;  ///< of received_bytes, what travels while the rank computes
  double messages = 0;          ///< transfers that wait for one another: each costs a latency
  double peer_messages = 0;     ///< of them, those through buffers that GPUs write for each other
  double work = 1;              ///< of the whole attention, the part that a rank computes where
                                ///< rows and keys are dealt evenly
  double calls = 1;             ///< of attention, one behind the other
  double keys_read = 1;         ///< of all keys and values, the part that a rank reads
  double merged_bytes = 0;      ///< of states that a rank folds
  double copied_bytes = 0;      ///< of rows that it packs, or puts in order
};

/// The cost by the strategy that `options.strategy` names, on ranks that compute there; throws as
/// choose_strategy and forecast do.
RunCost cost_of(const Options& options, int ranks, const RunSize& size,
                Device device = Device::host);

/// How ranks are spread over nodes.
struct Topology {
  int ranks = 1;           ///< in all
  int ranks_per_node = 0;  ///< of which so many share a node; 0: all
};

/// What a strategy is predicted to do with a run. Times are seconds, of the rank that takes
/// longest.
struct Forecast {
  const StrategyInfo* strategy = nullptr;  ///< whose
  std::string refusal;                     ///< why it cannot serve such a layer; empty: it can
  std::string reservation;                 ///< why "auto" leaves it out, although it could
  RunCost cost;                            ///< what it takes, with what follows, where it can
  double far_bytes = 0;                    ///< of the received bytes, what comes from other nodes
  double balance = 1;                      ///< the visible tiles, 128 rows by 128 keys, of the rank
                                           ///< that has most of them, over the mean
  double attend = 0;                       ///< attention over what a rank has
  double exchange = 0;                     ///< what travels, as far as nothing hides it
  double hidden = 0;                       ///< what travels behind the attention
  double merge = 0;                        ///< folding of states, packing and putting in order

  /// What the run takes.
  double seconds() const { return attend + exchange + merge; }
};

/// Predicts a run of that size by every strategy of strategies(), in their order. The model:
///
///     attend    calls call_s + balance work flops / flops_per_s + read bytes / key_bytes_per_s
///     transfer  messages latency_s + received bytes / link_bytes_per_s, each link its own; of
///               messages that are peer_messages, peer_latency_s
///     hidden    as much of the overlapped bytes' time as `overlap` allows and attend is long
///     merge     merged bytes / merge_bytes_per_s + copied bytes / copy_bytes_per_s
///
/// It refuses what takes more workspace than Limits::max_workspace. Throws UsageError for options,
/// ranks, sizes and constants of a machine that make no sense, and Unsupported for options that no
/// layer has.
std::vector<Forecast> forecast(const Options& options, const Topology& topology,
                               const RunSize& size, const Machine& machine);

/// The largest run that the limits of a layer on `ranks` ranks allow. Throws as forecast does.
RunSize largest_run(const Options& options, int ranks);

/// The strategy that `options.strategy` names. "auto" is the one whose forecast of largest_run is
/// the shortest, among those that take every run of such a layer and, on processors and with
/// Options::invariant, give the bits of gather-states; without max_kv_len it is the first of them.
/// Throws as forecast does; Unsupported, with the known names, for any other name; and, with the
/// reason and the strategies that could, for one that cannot serve such a layer.
const StrategyInfo& choose_strategy(const Options& options, int ranks, const Machine& machine);

/// The same for a layer on these ranks, by rank 0's machine_here, so that all choose alike. It is
/// collective where the name is "auto".
const StrategyInfo& choose_strategy(const Communicator& world, const Options& options);

}  // namespace longspan
