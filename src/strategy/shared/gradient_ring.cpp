#include "src/strategy/shared/gradient_ring.hpp"

#include <fmt/format.h>

namespace longspan {

GradientRing::GradientRing(const LayerContext& layer, const char* blocks)
    : layer_(layer),
      block_steps_(1),
      result_steps_(1),
      route_(layer.comm.size()),
      underway_(layer.comm.size()) {
  for (int s = 1; s < ranks(); ++s) {
    const auto step = [&](const char* what) {
      return fmt::format("backward, ring of {}, step {} of {}", what, s, ranks() - 1);
    };
    block_steps_.push_back(step(blocks));
    result_steps_.push_back(step("gradients"));
  }
}

void GradientRing::lay_out(Parts& memory, std::int64_t bytes) {
  if (ranks() == 1) return;
  for (auto* slots : {&leaving_, &arriving_})
    for (std::byte*& sums : *slots) sums = memory.take(static_cast<std::size_t>(bytes));
}

comm::Transfers GradientRing::start(std::span<const comm::Piece> pieces, const Move& move,
                                    Stream stream) const {
  return layer_.comm.start_shifts(pieces, move.distance, stream,
                                  block_steps_[static_cast<std::size_t>(move.distance)].c_str());
}

comm::Transfers GradientRing::start_sums(const Move& move, std::size_t sent, std::size_t received,
                                         Stream stream) const {
  const comm::Piece sums{leaving(move.slot), sent, arriving_[static_cast<std::size_t>(move.slot)],
                         received};
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
