#include "src/strategy/shared/gradient_ring.hpp"

#include <fmt/format.h>

namespace longspan {

GradientRing::GradientRing(const LayerContext& layer, const char* blocks)
    : layer_(layer),
      block_steps_(1),
      result_steps_(1),
      route_(layer.comm.size()),
      underway_(layer.comm.size()),
      returned_(layer),
      with_guests_(layer) {
  for (int s = 1; s < ranks(); ++s) {
    const auto step = [&](const char* what) {
      return fmt::format("backward, ring of {}, step {} of {}", what, s, ranks() - 1);
    };
    block_steps_.push_back(step(blocks));
    result_steps_.push_back(step("gradients"));
  }
}

double GradientRing::workspace_bytes(const Options& options, int ranks, double guest,
                                     double staying) {
  return kSlots * guest +
         (options.invariant ? RankParts::workspace_bytes(ranks, guest + staying) : guest);
}

void GradientRing::lay_out(Parts& memory, std::int64_t guest, std::int64_t staying) {
  if (ranks() == 1) return;
  const auto take = [&] { return memory.take(static_cast<std::size_t>(guest)); };
  for (std::byte*& sums : leaving_) sums = take();
  if (!keeps()) {
    arriving_ = take();
    return;
  }
  returned_.lay_out(memory, guest);
  with_guests_.lay_out(memory, staying);
}

comm::Transfers GradientRing::start(std::span<const comm::Piece> pieces, const Move& move,
                                    Stream stream) const {
  return layer_.comm.start_shifts(pieces, move.distance, stream,
                                  block_steps_[static_cast<std::size_t>(move.distance)].c_str());
}

comm::Transfers GradientRing::start_sums(const Move& move, std::size_t sent, std::size_t received,
                                         Stream stream) const {
  const comm::Piece sums{leaving(move.slot), sent, arriving(move), received};
  const auto step = static_cast<std::size_t>(ranks() - move.distance);
  return layer_.comm.start_shifts({&sums, 1}, move.distance, stream, result_steps_[step].c_str());
}

void GradientRing::walk(const Pass& pass, const IsWanted& is_wanted, Visitor& visitor) {
  if (ranks() == 1) {
    visitor.visit({.kind = Step::visit}, {});
    return visitor.finish();
  }
  make_ring({.ranks = ranks(),
             .rank = rank(),
             .slots = kSlots,
             .digests_first = true,
             .returns_results = true},
            is_wanted, route_);
  longspan::walk(route_, pass, layer_.comm, "backward, agreement", underway_, visitor);
}

}  // namespace longspan
