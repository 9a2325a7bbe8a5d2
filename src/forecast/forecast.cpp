// Predicts the run of each strategy, from the bytes and the work that the strategy declares and the
// constants of the machine.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include "longspan/error.hpp"
#include "longspan/options.hpp"
#include "longspan/strategy.hpp"
#include "src/arguments/validate.hpp"
#include "src/forecast/visible_work.hpp"
#include "src/strategy/shared/bias_gradients.hpp"
#include "src/strategy/shared/most_rows.hpp"
#include "src/strategy/shared/node_ranks.hpp"
#include "src/strategy/shared/partial_dout.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {
namespace {

/// The part of the other ranks that are on other nodes.
double far_part(const Topology& topology) {
  if (topology.ranks == 1 || topology.ranks_per_node == 0) return 0;
  const int own = std::min(topology.ranks_per_node, topology.ranks);
  return static_cast<double>(topology.ranks - own) / (topology.ranks - 1);
}

/// The seconds for a transfer of `bytes`, of which `far_bytes` come from other nodes.
double transfer_seconds(double bytes, double far_bytes, const Machine& machine) {
  return (bytes - far_bytes) / machine.link_bytes_per_s + far_bytes / machine.node_link_bytes_per_s;
}

/// The work of a run, and how evenly strategies share it. Many strategies share it alike, so each
/// way is computed once.
class Work {
 public:
  Work(const Options& options, int ranks, const RunSize& size)
      : options_(options), ranks_(ranks), batch_(sequences_of(size, options.mask)) {}

  double flops() const {
    const Options& o = options_;
    return 2.0 * o.heads * (o.head_dim + o.of_values()) * pairs();
  }
  /// The keys, of `all`, that some row reads.
  double keys_read(double all) const {
    if (options_.indices.top_k == 0) return all;
    double keys = 0;
    for (const Sequences& s : batch_) keys += s.count * read(s, static_cast<double>(s.rows));
    return keys;
  }
  double balance(Balanced by, int levels) {
    const auto [known, is_new] = balances_.try_emplace({by, levels}, 1.0);
    if (!is_new) return known->second;
    const Options& o = options_;
    Sharding dealt = by == Balanced::by_queries ? o.queries.value_or(Sharding{}) : o.keys;
    if (levels == 2) dealt = of_nodes(dealt, o.ranks_per_node);
    return known->second = balance_of(dealt, by, o.mask, batch_, o.heads / o.kv_heads,
                                      ranks_ / (levels == 2 ? o.ranks_per_node : 1));
  }

 private:
  /// The keys of a sequence that rows read which each name top_k of them.
  double read(const Sequences& s, double rows) const {
    return std::min(static_cast<double>(s.keys), rows * options_.indices.top_k);
  }
  double pairs() const {
    if (options_.indices.top_k == 0) return visible_pairs(options_.mask, batch_);
    double all = 0;
    for (const Sequences& s : batch_) all += s.count * static_cast<double>(s.rows) * read(s, 1);
    return all;
  }

  const Options& options_;
  int ranks_;
  std::vector<Sequences> batch_;
  std::map<std::pair<Balanced, int>, double> balances_;
};

/// The seconds of a backward. Scores, dq and dk are products over head_dim; the gradients of
/// weights, and dv, over value_dim.
double backward_seconds(const Forecast& f, double flops, double far, const Options& o,
                        const Machine& machine) {
  const BackwardCost& cost = f.cost.backward;
  const double products = (3.0 * o.head_dim + 2.0 * o.of_values()) / (o.head_dim + o.of_values());
  const double attend = cost.calls * machine.call_s +
                        f.balance * f.cost.work * products * flops / machine.flops_per_s;
  // With two levels, only the exchange between nodes overlaps the attention.
  const bool two_levels = cost.far_bytes >= 0;
  const double overlapped = transfer_seconds(
      cost.overlapped_bytes, (two_levels ? 1 : far) * cost.overlapped_bytes, machine);
  const double hidden = std::min(overlapped * machine.overlap, attend);
  return attend + cost.messages * (far > 0 ? machine.node_latency_s : machine.latency_s) +
         transfer_seconds(cost.received_bytes,
                          two_levels ? cost.far_bytes : far * cost.received_bytes, machine) -
         hidden + cost.copied_bytes / machine.copy_bytes_per_s;
}

void predict(Forecast& f, Work& work, double flops, const Options& o, const Topology& topology,
             const RunSize& size, const Machine& machine) {
  const bool two_levels = f.strategy->levels == 2;
  f.balance = work.balance(entry_of(*f.strategy).balanced(o), f.strategy->levels);
  const RunCost& cost = f.cost;
  f.attend =
      cost.calls * machine.call_s + f.balance * cost.work * flops / machine.flops_per_s +
      cost.keys_read * work.keys_read(size.keys) * key_row_bytes(o) / machine.key_bytes_per_s;
  // With two levels, only the exchange between nodes overlaps the attention.
  const double far = far_part(topology);
  f.far_bytes = two_levels ? cost.far_bytes : far * cost.received_bytes;
  const double overlapped = transfer_seconds(
      cost.overlapped_bytes, (two_levels ? 1 : far) * cost.overlapped_bytes, machine);
  f.hidden = std::min(overlapped * machine.overlap, f.attend);
  const double waits = far > 0 ? cost.messages * machine.node_latency_s
                               : (cost.messages - cost.peer_messages) * machine.latency_s +
                                     cost.peer_messages * machine.peer_latency_s;
  f.exchange = waits + transfer_seconds(cost.received_bytes, f.far_bytes, machine) - f.hidden;
  f.merge =
      cost.merged_bytes / machine.merge_bytes_per_s + cost.copied_bytes / machine.copy_bytes_per_s;
  if (o.gradients) f.backward = backward_seconds(f, flops, far, o, machine);
}

void check_topology(const Topology& topology) {
  if (topology.ranks_per_node < 0)
    throw UsageError(fmt::format("ranks_per_node {} is negative; 0 means all on one node",
                                 topology.ranks_per_node));
}

/// Throws UsageError for invalid counts, and for counts beyond 63 bits, in which bytes of rows are
/// counted and sequences iterated.
void check_size(const RunSize& size, const Options& o) {
  const auto check = [](double count, double most, const char* name) {
    if (!(count >= 0 && count <= most))
      throw UsageError(fmt::format("a run of {} {}; 0 to {:.3g} are possible", count, name, most));
  };
  constexpr double kMost = 0x1p60, kLongest = 0x1p41;
  const double row = 4.0 * o.heads * std::max(o.head_dim, o.of_values());
  check(size.sequences, kMost, "sequences");
  check(size.tokens, kMost / row, "tokens");
  check(size.most_tokens, kMost / row, "tokens of one rank (most_tokens)");
  check(size.keys, 0x1p62, "keys");
  const double count = std::max(1.0, size.sequences), longest = std::min(kLongest, kMost / row);
  check(size.keys / count, longest, "keys in a sequence");
  for (const SequenceSize& one : size.each) {
    check(static_cast<double>(one.rows), longest, "tokens in a sequence (each)");
    check(static_cast<double>(one.keys), longest, "keys in a sequence (each)");
  }
}

std::string reservation(const StrategyEntry& entry, const Options& options, int ranks,
                        Device device) {
  if (ranks == 1) return "";
  if (!entry.takes_tables &&
      (is_by_table(options.keys) || (options.queries && is_by_table(*options.queries))))
    return "of keys or queries that are dealt by a table it does not take every run";
  if (options.dtypes.compute == DType::fp64) return "";  // its keys always fold by position
  const bool in_order = options.invariant || (device == Device::host && !options.gradients);
  if (in_order && !entry.keeps_order(options, ranks))
    return "it does not fold in the order of gather-states, whose bits hold for every batch";
  return "";
}

/// The cost of the strategy, and of the layer itself.
RunCost cost_of(const StrategyEntry& entry, const Options& options, int ranks, const RunSize& size,
                Device device) {
  RunCost cost = entry.cost(options, ranks, size, device);
  cost.workspace_bytes += rotated_bytes(options) +
                          static_cast<double>(BiasGradients::bytes(options, ranks)) +
                          static_cast<double>(PartialDout::bytes(options, ranks));
  return cost;
}

/// Why a strategy cannot give the gradients that the options ask for; empty if it can.
std::string refuse_gradients(const StrategyEntry& entry, const Options& options, int ranks,
                             Device device) {
  if (!options.gradients || ranks == 1) return "";
  if (!options.queries && entry.gradients == GradientsOf::sharded_queries)
    return "its gradients are of sharded queries (Options::queries); with rows on all ranks the "
           "gradients of keys would be counted once a rank";
  if (device == Device::cuda && entry.sends_rows_back && options.queries &&
      options.queries->layout == Layout::ranges)
    return "its backward sends query rows, of which a GPU takes no ranges; ring-kv and gather-kv "
           "take them";
  if (options.invariant && !entry.keeps_order(options, ranks))
    return "its gradients are not the same bits for every number of ranks (invariant)";
  return "";
}

/// Why a strategy cannot compute in fp64, if the options ask for it; empty if it can.
std::string refuse_fp64(const StrategyEntry& entry, const Options& options) {
  if (options.dtypes.compute != DType::fp64 || entry.takes_fp64) return "";
  return "its states, or the lse that it sends, are fp32; gather-kv computes in fp64";
}

/// Why a strategy cannot serve rows that name their keys; empty if it can.
std::string refuse_indices(const StrategyEntry& entry, const Options& options) {
  if (options.indices.top_k == 0 || entry.takes_indices) return "";
  return "with indices each rank attends to the named keys that it holds; gather-states and "
         "scatter-states do so";
}

}  // namespace

std::vector<Forecast> consider(const Options& options, int ranks, const RunSize& size,
                               Device device) {
  check_size(size, options);
  std::vector<Forecast> all;
  const auto limit = static_cast<double>(options.limits.max_workspace);
  for (const StrategyInfo& info : strategies()) {
    const StrategyEntry& entry = entry_of(info);
    Forecast& f = all.emplace_back();
    f.strategy = &info;
    f.refusal = refuse_gradients(entry, options, ranks, device);
    if (f.refusal.empty()) f.refusal = refuse_fp64(entry, options);
    if (f.refusal.empty()) f.refusal = refuse_indices(entry, options);
    if (f.refusal.empty()) f.refusal = entry.refusal(options, ranks);
    if (!f.refusal.empty()) continue;
    f.reservation = reservation(entry, options, ranks, device);
    f.cost = cost_of(entry, options, ranks, size, device);
    if (limit > 0 && f.cost.workspace_bytes > limit)
      f.refusal = fmt::format("it takes {:.4g} MiB of workspace, and max_workspace allows {:.4g}",
                              f.cost.workspace_bytes / (1 << 20), limit / (1 << 20));
  }
  return all;
}

std::vector<Forecast> forecast(const Options& given, const Topology& topology, const RunSize& size,
                               const Machine& machine) {
  check_values(given, topology.ranks);
  check_topology(topology);
  check_machine(machine);
  Options options = given;
  if (options.ranks_per_node == 0)
    options.ranks_per_node = topology.ranks_per_node > 0 ? topology.ranks_per_node : topology.ranks;
  std::vector<Forecast> all = consider(options, topology.ranks, size, machine.device);
  Work work(options, topology.ranks, size);
  const double flops = work.flops();
  for (Forecast& f : all)
    if (f.refusal.empty()) predict(f, work, flops, options, topology, size, machine);
  return all;
}

RunCost cost_of(const Options& options, int ranks, const RunSize& size, Device device) {
  const Machine machine = built_in_machine(Device::host);
  const StrategyInfo& strategy = choose_strategy(options, ranks, machine);
  check_size(size, options);
  return cost_of(entry_of(strategy), options, ranks, size, device);
}

RunSize largest_run(const Options& options, int ranks) {
  check_values(options, ranks);
  const Limits& limits = options.limits;
  const double most = static_cast<double>(limits.max_tokens), sequences = limits.max_batch;
  RunSize size{.sequences = sequences};
  size.tokens = options.queries ? most * ranks : most;
  size.most_tokens = options.queries ? most : 0;
  size.keys = static_cast<double>(most_keys(limits, limits.max_batch));
  return size;
}

}  // namespace longspan
