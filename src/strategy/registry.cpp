// Registers the strategies, and chooses among them. CMake lists the files of src/strategy/, each of
// which has a function with the file's name.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/tensors.hpp"
#include "longspan/attention.hpp"
#include "longspan/communicator.hpp"
#include "longspan/error.hpp"
#include "longspan/storage.hpp"
#include "longspan/strategy.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {

#define LONGSPAN_STRATEGY(name) StrategyEntry name();
#include "src/strategy/all.inc"
#undef LONGSPAN_STRATEGY

namespace {

struct Registry {
  std::vector<StrategyEntry> entries;
  std::vector<StrategyInfo> infos;  // one for each of these entries

  Registry() {
#define LONGSPAN_STRATEGY(name) entries.push_back(name());
#include "src/strategy/all.inc"
#undef LONGSPAN_STRATEGY
    const std::vector<StrategyEntry> two_levels = two_level_strategies();
    entries.insert(entries.end(), two_levels.begin(), two_levels.end());
    std::sort(entries.begin(), entries.end(), [](const StrategyEntry& a, const StrategyEntry& b) {
      return a.preference < b.preference;
    });
    for (const StrategyEntry& entry : entries) infos.push_back(entry.info);
  }
};

const Registry& registry() {
  static const Registry all;
  return all;
}

}  // namespace

std::span<const StrategyInfo> strategies() { return registry().infos; }

const StrategyEntry& entry_of(const StrategyInfo& info) {
  return registry().entries[static_cast<std::size_t>(&info - registry().infos.data())];
}

bool folds_as_one_rank(const Options& options, int ranks) {
  const Shard shard{options.keys.layout, 0, ranks, 0, options.keys.block};
  return shard.layout == Layout::contiguous && shard.keeps_order();
}

void require_exchange(const Options& options, bool is_had, const std::string& why) {
  if (!is_had && options.exchange != Exchange::automatic)
    throw Unsupported(fmt::format(
        "exchange {} was asked for, and is not available here: {}. Take auto or gather.",
        name(options.exchange), why));
}

std::string refuse_parts(const Options& options) {
  if (options.results.part == ResultPart::all) return "";
  return fmt::format("it does not give results by {} to ranks that hold all the queries",
                     name(options.results.part));
}

double query_row_bytes(const Options& o) {
  return 1.0 * o.heads * storage_of(o.dtypes.of_query()).row_bytes(o.head_dim);
}
std::int64_t travelling_value_bytes(const Options& o) {
  return o.values_in_keys ? 0 : storage_of(o.dtypes.of_kv()).row_bytes(o.of_values());
}
double key_row_bytes(const Options& o) {
  const StorageFormat format = storage_of(o.dtypes.of_kv());
  return 1.0 * o.kv_heads * (format.row_bytes(o.head_dim) + travelling_value_bytes(o));
}
double state_row_bytes(const Options& o) {
  return (4.0 * kernels::padded_dim(o.of_values()) + 8.0) * o.heads;
}

double rotated_bytes(const Options& o) {
  return o.rope.dim > 0 ? static_cast<double>(o.limits.max_tokens) * query_row_bytes(o) : 0.0;
}

double state_slot_bytes(const Options& o, double rows, int heads) {
  const double states = rows * heads;
  return std::ceil(states * 8.0 / 16.0) * 16.0 + 4.0 * states * kernels::padded_dim(o.of_values());
}

namespace {

/// Whether there are several to choose from, for runs of known size.
bool takes_forecast(const Options& options, int ranks) {
  return options.strategy == "auto" && ranks > 1 && options.limits.max_kv_len > 0;
}

[[noreturn]] void refuse(const Options& options, const std::vector<Forecast>& all) {
  std::string known, could, reasons;
  for (const Forecast& f : all) {
    known += fmt::format(" {}", f.strategy->name);
    if (f.refusal.empty()) could += fmt::format(" {}", f.strategy->name);
    if (options.strategy != "auto" && options.strategy != f.strategy->name) continue;
    reasons += fmt::format("{}{}: {}", reasons.empty() ? "" : "; ", f.strategy->name,
                           f.refusal.empty() ? f.reservation : f.refusal);
  }
  if (reasons.empty())
    throw Unsupported(fmt::format("strategy \"{}\" was asked for; this build knows: auto{}",
                                  options.strategy, known));
  if (could.empty()) could = " none";
  throw Unsupported(
      fmt::format("strategy \"{}\" was asked for, and is not available: {}. Strategies "
                  "that could:{}",
                  options.strategy, reasons, could));
}

}  // namespace

const StrategyInfo& choose_strategy(const Options& options, int ranks, const Machine& machine) {
  const bool any = options.strategy == "auto", predicted = takes_forecast(options, ranks);
  const RunSize size = largest_run(options, ranks);
  const std::vector<Forecast> all =
      predicted ? forecast(options, {.ranks = ranks, .ranks_per_node = options.ranks_per_node},
                           size, machine)
                : consider(options, ranks, size, machine.device);
  const Forecast* best = nullptr;
  for (const Forecast& f : all) {
    if (!f.refusal.empty()) continue;
    if (any ? !f.reservation.empty() : options.strategy != f.strategy->name) continue;
    if (best == nullptr || (predicted && f.seconds() < best->seconds())) best = &f;
  }
  if (best == nullptr) refuse(options, all);
  return *best->strategy;
}

Machine shared_machine(const Communicator& world) {
  // If one rank cannot read the constants, every rank throws the error.
  std::string mine;
  if (world.rank() == 0) try {
      const Machine machine = machine_here(world.device());
      mine = fmt::format("+{}\n{}", to_text(machine), machine.name);  // a name may be any text
    } catch (const std::exception& error) {
      mine = std::string("-") + error.what();
    }
  const std::string text = world.gather(mine, "constants of the machine")[0];
  if (text.empty() || text.front() != '+')
    throw UsageError(fmt::format("the constants of the machine of rank 0: {}",
                                 text.empty() ? "there are none" : text.substr(1)));
  const std::size_t gap = text.find("\n\n");
  return machine_from(text.substr(1, gap), text.substr(gap + 2), world.device());
}

const StrategyInfo& choose_strategy(const Communicator& world, const Options& given) {
  Options options = given;
  if (options.ranks_per_node == 0) options.ranks_per_node = world.ranks_per_node();
  const bool predicted = takes_forecast(options, world.size());
  return choose_strategy(options, world.size(),
                         predicted ? shared_machine(world) : built_in_machine(world.device()));
}

}  // namespace longspan
