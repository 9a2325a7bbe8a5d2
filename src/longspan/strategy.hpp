/// \file
/// How states, queries or keys travel between ranks. Each strategy is one row of a table. The same
/// table feeds `longspan run --list-strategies`, the documentation, and "auto", which chooses the
/// strategy that is predicted to be fastest.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "longspan/machine.hpp"

namespace longspan {

class Communicator;
struct Options;

/// What a strategy needs from a rank, gives it, and costs.
struct StrategyInfo {
  const char* name;      ///< the name for Options::strategy
  const char* queries;   ///< what a rank must hold
  const char* result;    ///< what a rank gets
  const char* received;  ///< bytes received per rank; P ranks, T query rows, S keys, b bytes of a
                         ///< key's element
  int levels = 1;        ///< 2: one strategy within a node, another between nodes

  /// Whether the strategy has two levels on nodes of this size; 0 is an unknown size.
  bool is_for_nodes_of(int ranks_per_node, int ranks) const {
    return levels == 1 || (ranks_per_node > 1 && ranks_per_node < ranks);
  }
};

/// Every strategy of this build, in order of preference.
std::span<const StrategyInfo> strategies();

/// The size of one sequence of a run.
struct SequenceSize {
  std::int64_t rows = 0;  ///< of queries, on all ranks
  std::int64_t keys = 0;  ///< on all ranks
};

/// The size of a run, in doubles so that no size overflows.
struct RunSize {
  double tokens = 0;                    ///< query rows, of all sequences and ranks
  double most_tokens = 0;               ///< with sharded queries: the most on one rank
  double keys = 0;                      ///< of all sequences, on all ranks
  double sequences = 1;                 ///< number of sequences that share these
  std::vector<SequenceSize> each = {};  ///< of packed documents and other sequences of different
                                        ///< sizes, each distributed by itself; empty: all are alike
};

/// What the backward of a run costs on each rank (Options::gradients); its memory is part of
/// RunCost::workspace_bytes.
struct BackwardCost {
  double received_bytes = 0;    ///< from the other ranks
  double far_bytes = -1;        ///< the part of them that comes from other nodes; below 0: equal
                                ///< amounts from every other rank
  double overlapped_bytes = 0;  ///< the part of them that travels while the rank computes
  double messages = 0;          ///< transfers that wait for one another; each costs a latency
  double calls = 1;             ///< calls of the kernel, one after another
  double copied_bytes = 0;      ///< of rows and keys that it packs, reorders or adds up
};

/// What a run of that size costs on each rank.
struct RunCost {
  double received_bytes = 0;    ///< from the other ranks
  double workspace_bytes = 0;   ///< of the layer, without the scratch of its kernels
  double far_bytes = -1;        ///< the part of received_bytes that comes from other nodes; below
                                ///< 0: equal amounts from every other rank
  double overlapped_bytes = 0;  ///< the part of received_bytes that travels while the rank computes
  double messages = 0;          ///< transfers that wait for one another; each costs a latency
  double peer_messages = 0;     ///< the part of messages through buffers that GPUs write for each
                                ///< other
  double work = 1;              ///< the part of the whole attention that a rank computes if rows
                                ///< and keys are distributed evenly
  double calls = 1;             ///< attention calls, one after another
  double keys_read = 1;         ///< the part of all keys and values that a rank reads
  double merged_bytes = 0;      ///< of states that a rank folds
  double copied_bytes = 0;      ///< of rows that it packs or reorders
  BackwardCost backward = {};   ///< of its backward, if the layer has gradients
};

/// The cost with the strategy that `options.strategy` names, on ranks that compute on `device`;
/// throws as choose_strategy and forecast do.
RunCost cost_of(const Options& options, int ranks, const RunSize& size,
                Device device = Device::host);

/// How ranks are distributed over nodes.
struct Topology {
  int ranks = 1;           ///< number of ranks
  int ranks_per_node = 0;  ///< ranks on a node; 0: all
};

/// The prediction for a run with one strategy. Times are seconds, of the rank that takes longest.
struct Forecast {
  const StrategyInfo* strategy = nullptr;  ///< the strategy
  std::string refusal;                     ///< why it cannot serve such a layer; empty: it can
  std::string reservation;                 ///< why "auto" leaves it out although it could serve the
                                           ///< layer
  RunCost cost;                            ///< the cost; this and the following are set if it can
                                           ///< serve the layer
  double far_bytes = 0;                    ///< the part of the received bytes that comes from other
                                           ///< nodes
  double balance = 1;                      ///< visible tiles, 128 rows by 128 keys, of the rank
                                           ///< that has most, over the mean
  double attend = 0;                       ///< attention over the keys of a rank
  double exchange = 0;                     ///< transfers that computation does not hide
  double hidden = 0;                       ///< transfers that the attention hides
  double merge = 0;                        ///< folds of states, packing and reordering
  double backward = 0;                     ///< with Options::gradients: the backward, with its
                                           ///< transfers

  /// The time of the run, and of its backward.
  double seconds() const { return attend + exchange + merge + backward; }
};

/// Predicts a run of that size with every strategy of strategies(), in their order. The model:
///
///     attend    calls call_s + balance work flops / flops_per_s + read bytes / key_bytes_per_s
///     transfer  messages latency_s + received bytes / link_bytes_per_s, each link its own; of
///               messages that are peer_messages, peer_latency_s
///     hidden    the smaller of attend and `overlap` times the time of the overlapped bytes
///     merge     merged bytes / merge_bytes_per_s + copied bytes / copy_bytes_per_s
///     backward  the same of its five products, where the attention has two, and of its transfers
///
/// It refuses strategies that need more workspace than Limits::max_workspace. Throws UsageError for
/// options, ranks, sizes and machine constants that make no sense, and Unsupported for options that
/// no layer has.
std::vector<Forecast> forecast(const Options& options, const Topology& topology,
                               const RunSize& size, const Machine& machine);

/// The largest run that the limits of a layer on `ranks` ranks allow. Throws as forecast does.
RunSize largest_run(const Options& options, int ranks);

/// The strategy that `options.strategy` names. "auto" takes the shortest forecast of largest_run
/// among the strategies that support every run of such a layer. On CPUs, and with
/// Options::invariant, they must also give the same bits as gather-states. Without max_kv_len it
/// takes the first of them. Throws as forecast does. Throws Unsupported with the known names for
/// any other name, and with the reason and the strategies that could for one that cannot serve such
/// a layer.
const StrategyInfo& choose_strategy(const Options& options, int ranks, const Machine& machine);

/// The same for a layer on these ranks, with rank 0's machine_here, so that all choose alike.
/// Collective if the name is "auto".
const StrategyInfo& choose_strategy(const Communicator& world, const Options& options);

}  // namespace longspan
