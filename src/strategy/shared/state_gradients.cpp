#include "src/strategy/shared/state_gradients.hpp"

namespace longspan {

StateGradients::StateGradients(const LayerContext& layer, const DealtRows& rows) : starts_(layer) {
  if (layer.options.queries)
    sharded_.emplace(layer, rows, starts_);
  else
    replicated_.emplace(layer);
}

double StateGradients::workspace_bytes(const Options& options, int ranks, const RunSize& size,
                                       Device device) {
  return options.queries ? RowGradients::workspace_bytes(options, ranks, size, device)
                         : ReplicatedGradients::workspace_bytes(options, ranks, size);
}

BackwardCost StateGradients::cost(const Options& options, int ranks, const RunSize& size) {
  return options.queries ? RowGradients::cost(options, ranks, size)
                         : ReplicatedGradients::cost(options, ranks, size);
}

void StateGradients::lay_out(Parts& memory) {
  if (replicated_) return replicated_->lay_out(memory);
  starts_.lay_out(memory);
  sharded_->lay_out(memory);
}

void StateGradients::backward(const Pass& pass, const GradientArgs& args) {
  if (replicated_) return replicated_->backward(pass, args);
  Pass own = pass;
  own.attend = pass.run.attend;  // with this rank's rows
  sharded_->backward(own, args);
}

}  // namespace longspan
