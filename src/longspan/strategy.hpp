// How states, queries or keys travel between ranks. One row a strategy: the same table feeds
// `longspan run --list-strategies`, the documentation, and the choice made by "auto", which is the
// first row that serves such a layer.
#pragma once

#include <span>
#include <string>

namespace longspan {

struct Options;

struct StrategyInfo {
  const char* name;
  const char* queries;   // what a rank must hold
  const char* result;    // what a rank gets
  const char* received;  // bytes received per rank; P ranks, T query rows, S keys, b bytes of a
                         // key's element
};

/// Every strategy of this build, in the order of preference.
std::span<const StrategyInfo> strategies();

/// The strategy that `options.strategy` names, "auto" resolved. Throws Unsupported, with the known
/// names, for any other; and, with the reason and the strategies that could, for one that cannot
/// serve such a layer.
const StrategyInfo& choose_strategy(const Options& options, int ranks);

}  // namespace longspan
