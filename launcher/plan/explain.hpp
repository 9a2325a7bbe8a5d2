// Prints the predicted times of the strategies, and why one was chosen.
#pragma once

#include <span>
#include <string>

#include "longspan/strategy.hpp"

namespace longspan::launcher {

/// A line for each strategy, that begins with '#'; `chosen` is marked.
std::string explanation(std::span<const Forecast> forecasts, const Options& options, int ranks);

}  // namespace longspan::launcher
