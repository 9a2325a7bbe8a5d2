// Backward of strategies that exchange states: keys stay there too. Sharded rows go around the ring
// (row_gradients.hpp); replicated rows stay (replicated_gradients.hpp).
#pragma once

#include <optional>

#include "src/strategy/shared/replicated_gradients.hpp"
#include "src/strategy/shared/row_gradients.hpp"
#include "src/strategy/shared/row_starts.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {

class StateGradients {
 public:
  /// `rows` outlives this.
  StateGradients(const LayerContext& layer, const DealtRows& rows);

  static double workspace_bytes(const Options& options, int ranks, const RunSize& size,
                                Device device);
  static BackwardCost cost(const Options& options, int ranks, const RunSize& size);
  void lay_out(Parts& memory);

  /// `pass` is as DealtRows::prepare left it.
  void backward(const Pass& pass, const GradientArgs& args);

 private:
  RowStarts starts_;
  std::optional<RowGradients> sharded_;
  std::optional<ReplicatedGradients> replicated_;
};

}  // namespace longspan
