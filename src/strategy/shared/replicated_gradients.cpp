#include "src/strategy/shared/replicated_gradients.hpp"

#include "src/base/divided_up.hpp"
#include "src/strategy/shared/rank_fold.hpp"

namespace longspan {
namespace {

constexpr std::int64_t kWord = 64;  // bytes; shares are whole words, which sums have

std::int64_t share_of(std::int64_t bytes, std::int64_t ranks) {
  return divided_up(bytes, ranks * kWord) * kWord;
}

}  // namespace

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

std::int64_t ReplicatedGradients::share_bytes(std::int64_t rows) const {
  return share_of(memory_.row_sum_bytes(rows), layer_.comm.size());
}

void ReplicatedGradients::lay_out(Parts& memory) {
  const int ranks = layer_.comm.size();
  const std::int64_t all = ranks * share_bytes(layer_.bounds.tokens);
  memory_.lay_out(memory, all);
  if (ranks > 1) arriving_ = memory.take(static_cast<std::size_t>(all));
}

void ReplicatedGradients::backward(const Pass& pass, const GradientArgs& args) const {
  const Run& run = pass.run;
  pass.write_own_digest(layer_.kernels);
  memory_.begin(pass, args);
  kernels::GradientParams p = memory_.params(pass, args);
  memory_.give_key_sums(p, memory_.own_keys(run), memory_.own_key_starts());
  layer_.kernels.attend_gradients(p, run.stream);
  if (layer_.comm.size() > 1) add_up(pass, reinterpret_cast<std::byte*>(p.dq.data), p.tokens);
  memory_.finish(pass, args, p.tokens);
}

/// Replaces this rank's part of dq by the sum of all ranks' parts.
void ReplicatedGradients::add_up(const Pass& pass, std::byte* parts, std::int64_t rows) const {
  const Stream stream = pass.run.stream;
  const std::int64_t share = share_bytes(rows);
  const auto bytes = static_cast<std::size_t>(share);
  layer_.comm.all_to_all(parts, arriving_, bytes, stream, "backward, exchange of dq", pass.digests);
  const std::byte* const sum = RankFold(layer_.comm.size(), layer_.options.keys)(
      [&](int rank) { return arriving_ + rank * share; }, layer_.kernels, share, stream);
  layer_.comm.all_gather(sum, parts, bytes, stream, "backward, gather of dq");
}

}  // namespace longspan
