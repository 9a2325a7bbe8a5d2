#include "src/strategy/shared/replicated_gradients.hpp"

#include "src/base/at.hpp"
#include "src/strategy/shared/rank_sums.hpp"

namespace longspan {

ReplicatedGradients::ReplicatedGradients(const LayerContext& layer)
    : layer_(layer), keys_(layer), memory_(layer, keys_) {}

double ReplicatedGradients::workspace_bytes(const Options& options, int ranks,
                                            const RunSize& size) {
  if (!options.gradients) return 0;
  const double own = GradientMemory::workspace_bytes(options, ranks, size);
  return ranks == 1 ? own : own + GradientMemory::row_sum_bytes(options, size.tokens);
}

/// Twice the shares of the other ranks: of this rank's share, and of the sums.
BackwardCost ReplicatedGradients::cost(const Options& options, int ranks, const RunSize& size) {
  if (!options.gradients || ranks == 1) return {};
  const double sums = GradientMemory::row_sum_bytes(options, size.tokens);
  return {.received_bytes = 2 * (ranks - 1) * sums / ranks, .messages = 2, .copied_bytes = sums};
}

void ReplicatedGradients::lay_out(Parts& memory) {
  const int ranks = layer_.comm.size();
  const std::int64_t all = rank_sum_room(memory_.row_sum_bytes(layer_.bounds.tokens), ranks);
  memory_.lay_out(memory, all);
  if (ranks > 1) arriving_ = memory.take(at(all));
}

void ReplicatedGradients::backward(const Pass& pass, const GradientArgs& args) const {
  const Run& run = pass.run;
  pass.write_own_digest(layer_.kernels);
  memory_.begin(pass, args);
  kernels::GradientParams p = memory_.params(pass, args);
  memory_.give_key_sums(p, memory_.own_keys(run), memory_.own_key_starts());
  const bool stored = memory_.store_by_kernels(p, pass, args);
  layer_.kernels.attend_gradients(p, run.stream);
  if (layer_.comm.size() > 1)
    add_up_ranks(reinterpret_cast<std::byte*>(p.dq.data), arriving_,
                 memory_.row_sum_bytes(p.tokens), RankFold(layer_.comm.size(), layer_.options.keys),
                 layer_.kernels, layer_.comm, run.stream,
                 {"backward, exchange of dq", "backward, gather of dq"}, pass.digests);
  memory_.finish(pass, args, p.tokens, stored);
}

}  // namespace longspan
