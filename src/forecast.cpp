// Predicts what each strategy does with a run, from the bytes and the work that it says it takes
// and the constants of the machine.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "longspan/options.hpp"
#include "longspan/strategy.hpp"
#include "src/strategy/shared/node_ranks.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {
namespace {

/// Sequences of a run that are alike. Their rows are the last positions.
struct Sequences {
  std::int64_t rows = 0, keys = 0;  // of each of them
  double count = 1;

  std::int64_t first_row() const { return keys - rows; }
};

double length(const Interval& interval) {
  return interval.empty() ? 0.0 : static_cast<double>(interval.end - interval.begin);
}

/// The keys that the row at a position sees.
double seen_by_row(const Mask& mask, const Sequences& s, std::int64_t position) {
  return length(mask.visible(position, s.keys));
}

/// The rows that see the key at a position.
double seen_by_key(const Mask& mask, const Sequences& s, std::int64_t position) {
  Interval rows{s.first_row(), s.keys};
  if (mask.causal)
    rows.begin = std::max(rows.begin, position);
  else if (mask.right >= 0)
    rows.begin = std::max(rows.begin, position - mask.right);
  if (mask.window > 0) rows.end = std::min(rows.end, position + mask.window);
  return length(rows);
}

/// Walks over `count` positions in cells of equal size, whose middle stands for all of them.
template <class Visit>
void for_cells(std::int64_t count, std::int64_t cells, const Visit& visit) {
  cells = std::min(count, cells);
  for (std::int64_t c = 0; c < cells; ++c) {
    const std::int64_t begin = count * c / cells, end = count * (c + 1) / cells;
    visit(begin, end, (begin + end - 1) / 2);
  }
}

constexpr std::int64_t kCells = 4096;

/// In a batch of sequences that differ, each has its part of the cells, but no fewer than this.
constexpr std::int64_t kLeastCells = 64;

std::int64_t cells_of_each(std::int64_t cells, const std::vector<Sequences>& batch) {
  return std::max(kLeastCells, cells / static_cast<std::int64_t>(batch.size()));
}

/// The visible pairs of a row and a key.
double visible_pairs(const Mask& mask, const std::vector<Sequences>& batch) {
  double pairs = 0;
  for (const Sequences& s : batch)
    for_cells(s.rows, cells_of_each(kCells, batch),
              [&](std::int64_t begin, std::int64_t end, std::int64_t middle) {
                pairs += s.count * static_cast<double>(end - begin) *
                         seen_by_row(mask, s, s.first_row() + middle);
              });
  return pairs;
}

/// The visible pairs of a rank, whose part of each sequence is dealt out by the same rule.
double pairs_of_rank(const Sharding& dealt, bool by_keys, const Mask& mask,
                     const std::vector<Sequences>& batch, int rank, int ranks) {
  const std::int64_t cells = cells_of_each(std::max(kCells, 8 * std::int64_t{ranks}), batch);
  double own = 0;
  for (const Sequences& s : batch) {
    const std::int64_t count = by_keys ? s.keys : s.rows;
    const Shard shard = dealt.resolve(count, rank, ranks);
    for_cells(count, cells, [&](std::int64_t begin, std::int64_t end, std::int64_t middle) {
      const std::int64_t held = shard.before(end, count) - shard.before(begin, count);
      if (held == 0) return;
      own +=
          s.count * static_cast<double>(held) *
          (by_keys ? seen_by_key(mask, s, middle) : seen_by_row(mask, s, s.first_row() + middle));
    });
  }
  return own;
}

/// The visible pairs of the rank that has most of them, over the mean. Of thousands of ranks some
/// are looked at, the first and the last among them.
double balance_of(const Sharding& dealt, Balanced by, const Mask& mask,
                  const std::vector<Sequences>& batch, int ranks) {
  constexpr int kRanks = 256;
  if (by == Balanced::evenly || ranks == 1 || is_by_table(dealt)) return 1;
  const int looked_at = std::min(ranks, kRanks);
  double most = 0, sum = 0;
  for (int i = 0; i < looked_at; ++i) {
    const int rank =
        looked_at == 1 ? 0 : static_cast<int>(std::int64_t{ranks - 1} * i / (looked_at - 1));
    const double own = pairs_of_rank(dealt, by == Balanced::by_keys, mask, batch, rank, ranks);
    most = std::max(most, own);
    sum += own;
  }
  return sum > 0 ? most * looked_at / sum : 1;
}

/// The sequences of a run, those that are alike together. Of hundreds of lengths the middle one of
/// neighbours stands for them.
std::vector<Sequences> batch_of(const RunSize& size) {
  constexpr std::size_t kLengths = 256;
  const auto seen = [](std::int64_t rows, std::int64_t keys, double count) {
    return Sequences{std::min(rows, keys), keys, count};  // rows past the keys see nothing
  };
  if (size.each.empty()) {
    const double count = std::max(1.0, size.sequences);
    return {seen(std::llround(size.tokens / count), std::llround(size.keys / count), count)};
  }
  std::vector<Sequences> all;
  for (const SequenceSize& one : size.each) all.push_back(seen(one.rows, one.keys, 1));
  std::sort(all.begin(), all.end(), [](const Sequences& a, const Sequences& b) {
    return a.keys != b.keys ? a.keys < b.keys : a.rows < b.rows;
  });
  std::vector<Sequences> alike;
  for (const Sequences& one : all) {
    if (!alike.empty() && alike.back().keys == one.keys && alike.back().rows == one.rows)
      ++alike.back().count;
    else
      alike.push_back(one);
  }
  if (alike.size() <= kLengths) return alike;
  std::vector<Sequences> some;
  for (std::size_t i = 0; i < kLengths; ++i) {
    const std::size_t begin = alike.size() * i / kLengths, end = alike.size() * (i + 1) / kLengths;
    Sequences& stands = some.emplace_back(alike[(begin + end - 1) / 2]);
    stands.count = 0;
    for (std::size_t j = begin; j < end; ++j) stands.count += alike[j].count;
  }
  return some;
}

/// The part of the other ranks that are of other nodes.
double far_part(const Topology& topology) {
  if (topology.ranks == 1 || topology.ranks_per_node == 0) return 0;
  const int own = std::min(topology.ranks_per_node, topology.ranks);
  return static_cast<double>(topology.ranks - own) / (topology.ranks - 1);
}

/// The seconds that bytes take, some of them from other nodes.
double transfer_seconds(double bytes, double far_bytes, const Machine& machine) {
  return (bytes - far_bytes) / machine.link_bytes_per_s + far_bytes / machine.node_link_bytes_per_s;
}

double key_row_bytes(const Options& o) {
  return static_cast<double>(size_of(o.dtypes.of_kv())) * o.kv_heads * (o.head_dim + o.of_values());
}

void predict(Forecast& f, const Options& o, const Topology& topology, const RunSize& size,
             const Machine& machine) {
  const StrategyEntry& entry = entry_of(*f.strategy);
  const std::vector<Sequences> batch = batch_of(size);
  const Balanced by = entry.balanced(o);
  const bool two_levels = f.strategy->levels == 2;
  Sharding dealt = by == Balanced::by_queries ? o.queries.value_or(Sharding{}) : o.keys;
  if (two_levels) dealt = of_nodes(dealt, o.ranks_per_node);
  f.balance =
      balance_of(dealt, by, o.mask, batch, topology.ranks / (two_levels ? o.ranks_per_node : 1));
  const double flops = 2.0 * o.heads * (o.head_dim + o.of_values()) * visible_pairs(o.mask, batch);
  const RunCost& cost = f.cost;
  f.attend = cost.calls * machine.call_s + f.balance * cost.work * flops / machine.flops_per_s +
             cost.keys_read * size.keys * key_row_bytes(o) / machine.key_bytes_per_s;
  // Of two levels, what travels beside the attention is what the nodes exchange.
  const double far = far_part(topology);
  f.far_bytes = two_levels ? cost.far_bytes : far * cost.received_bytes;
  const double overlapped = transfer_seconds(
      cost.overlapped_bytes, (two_levels ? 1 : far) * cost.overlapped_bytes, machine);
  f.hidden = std::min(overlapped * machine.overlap, f.attend);
  f.exchange = cost.messages * (far > 0 ? machine.node_latency_s : machine.latency_s) +
               transfer_seconds(cost.received_bytes, f.far_bytes, machine) - f.hidden;
  f.merge =
      cost.merged_bytes / machine.merge_bytes_per_s + cost.copied_bytes / machine.copy_bytes_per_s;
}

std::string reservation(const StrategyEntry& entry, const Options& options, int ranks,
                        Device device) {
  if (ranks == 1) return "";
  if (!entry.takes_tables &&
      (is_by_table(options.keys) || (options.queries && is_by_table(*options.queries))))
    return "of keys or queries that are dealt by a table it does not take every run";
  if ((options.invariant || device == Device::host) && !entry.keeps_order(options, ranks))
    return "it does not fold in the order of gather-states, whose bits hold for every batch";
  return "";
}

}  // namespace

std::vector<Forecast> consider(const Options& options, int ranks, const RunSize& size,
                               Device device) {
  std::vector<Forecast> all;
  const auto limit = static_cast<double>(options.limits.max_workspace);
  for (const StrategyInfo& info : strategies()) {
    const StrategyEntry& entry = entry_of(info);
    Forecast& f = all.emplace_back();
    f.strategy = &info;
    f.refusal = entry.refusal(options, ranks);
    if (!f.refusal.empty()) continue;
    f.reservation = reservation(entry, options, ranks, device);
    f.cost = entry.cost(options, ranks, size);
    if (limit > 0 && f.cost.workspace_bytes > limit)
      f.refusal = fmt::format("it takes {:.4g} MiB of workspace, and max_workspace allows {:.4g}",
                              f.cost.workspace_bytes / (1 << 20), limit / (1 << 20));
  }
  return all;
}

std::vector<Forecast> forecast(const Options& given, const Topology& topology, const RunSize& size,
                               const Machine& machine) {
  Options options = given;
  if (options.ranks_per_node == 0)
    options.ranks_per_node = topology.ranks_per_node > 0 ? topology.ranks_per_node : topology.ranks;
  std::vector<Forecast> all = consider(options, topology.ranks, size, machine.device);
  for (Forecast& f : all)
    if (f.refusal.empty()) predict(f, options, topology, size, machine);
  return all;
}

RunSize largest_run(const Options& options, int ranks) {
  const Limits& limits = options.limits;
  const double most = static_cast<double>(limits.max_tokens), sequences = limits.max_batch;
  RunSize size{.sequences = sequences};
  size.tokens = options.queries ? most * ranks : most;
  size.most_tokens = options.queries ? most : 0;
  size.keys = static_cast<double>(limits.max_kv_len) * sequences;
  return size;
}

}  // namespace longspan
