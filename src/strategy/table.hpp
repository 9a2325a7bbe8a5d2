// The rows behind longspan/strategy.hpp, with the function that runs each.
#pragma once

#include <span>

#include "longspan/strategy.hpp"
#include "src/strategy/job.hpp"

namespace longspan {

using RunStrategy = void (*)(Job&);

/// The function of a row of strategies().
RunStrategy run_of(const StrategyInfo& info);

}  // namespace longspan
