// Registers the strategies, and chooses among them. CMake lists the files of src/strategy/, each of
// which has a function of its own name.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "longspan/attention.hpp"
#include "longspan/error.hpp"
#include "longspan/strategy.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {

#define LONGSPAN_STRATEGY(name) StrategyEntry name();
#include "src/strategy/all.inc"
#undef LONGSPAN_STRATEGY

namespace {

struct Registry {
  std::vector<StrategyEntry> entries;
  std::vector<StrategyInfo> infos;  // of these entries, one by one

  Registry() {
#define LONGSPAN_STRATEGY(name) entries.push_back(name());
#include "src/strategy/all.inc"
#undef LONGSPAN_STRATEGY
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

std::string refuse_parts(const Options& options) {
  if (options.results.part == ResultPart::all) return "";
  return fmt::format("it does not give results by {} to ranks that hold all the queries",
                     name(options.results.part));
}

double query_row_bytes(const Options& o) {
  return static_cast<double>(size_of(o.dtypes.of_query())) * o.heads * o.head_dim;
}
double state_row_bytes(const Options& o) { return (4.0 * o.of_values() + 8.0) * o.heads; }

double state_slot_bytes(const Options& o, double rows, int heads) {
  const double states = rows * heads;
  return std::ceil(states * 8.0 / 16.0) * 16.0 + 4.0 * states * o.of_values();
}

RunCost cost_of(const Options& options, int ranks, const RunSize& size) {
  return entry_of(choose_strategy(options, ranks)).cost(options, ranks, size);
}

const StrategyInfo& choose_strategy(const Options& options, int ranks) {
  std::string known, could, reasons;
  for (const StrategyInfo& info : strategies()) {
    const std::string refusal = entry_of(info).refusal(options, ranks);
    known += fmt::format(" {}", info.name);
    if (refusal.empty()) could += fmt::format(" {}", info.name);
    if (options.strategy != "auto" && options.strategy != info.name) continue;
    if (refusal.empty()) return info;
    reasons += fmt::format("{}{}: {}", reasons.empty() ? "" : "; ", info.name, refusal);
  }
  if (reasons.empty())
    throw Unsupported(fmt::format("strategy \"{}\" was asked for; this build knows: auto{}",
                                  options.strategy, known));
  if (could.empty()) could = " none";
  throw Unsupported(
      fmt::format("strategy \"{}\" was asked for, and cannot be had: {}. Strategies "
                  "that could:{}",
                  options.strategy, reasons, could));
}

}  // namespace longspan
