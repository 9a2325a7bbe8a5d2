// The table of strategies, and the choice among them. With one row "auto" has nothing to weigh; the
// cost model comes with the second.
#include <fmt/format.h>

#include <array>

#include "longspan/attention.hpp"
#include "longspan/error.hpp"
#include "longspan/strategy.hpp"
#include "src/strategy/table.hpp"

namespace longspan {
namespace {

constexpr std::array<StrategyInfo, 1> kStrategies{{
    {"gather-states", "all rows, or its own rows", "all rows, or its own rows",
     "(P-1) T heads 4 (dim + 2)"},
}};

constexpr std::array<RunStrategy, kStrategies.size()> kRun{gather_states};

}  // namespace

std::span<const StrategyInfo> strategies() { return kStrategies; }

RunStrategy run_of(const StrategyInfo& info) { return kRun[&info - kStrategies.data()]; }

const StrategyInfo& choose_strategy(const Options& options, int /*ranks*/) {
  if (options.strategy == "auto") return kStrategies.front();
  std::string known;
  for (const StrategyInfo& info : kStrategies) {
    if (options.strategy == info.name) return info;
    known += fmt::format(" {}", info.name);
  }
  throw Unsupported(fmt::format("strategy \"{}\" was asked for; this build knows: auto{}",
                                options.strategy, known));
}

}  // namespace longspan
