#include "src/strategy/shared/key_gradients.hpp"

#include <fmt/format.h>

namespace longspan {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

}  // namespace

/// Attends backward to each block of keys in turn.
class KeyGradients::Backward final : public Visitor {
 public:
  Backward(const KeyGradients& gradients, Pass& pass, const GradientArgs& args, const KeyBlock& own)
      : g_(gradients), pass_(pass), args_(args), own_(own) {}

  comm::Transfers start(const Move& move) override {
    return move.what == Move::blocks
               ? g_.start_keys(pass_.run, move, own_)
               : g_.returning_.start(move, pass_.run.stream, [this](int owner) {
                   return g_.memory_.key_sum_bytes(g_.keys_.rows_of(pass_.run, owner));
                 });
  }

  void visit(const Step& step, const kernels::BetweenTiles& between) override {
    const Run& run = pass_.run;
    const bool is_own = step.guest == Step::kOwn;
    GradientMemory::KeySums sums = g_.memory_.own_keys(run);
    const std::int64_t* starts = g_.memory_.own_key_starts();
    if (!is_own) {
      const int owner = g_.rank_at(-step.guest);
      const KeyBlock& block = g_.guests_[at(step.slot)];
      g_.keys_.find_starts(run, owner, block);
      g_.keys_.attend_to(pass_, block, g_.keys_.shard_of(run, owner, block));
      sums = {g_.returning_.leaving(step.result_slot), g_.keys_.rows_of(run, owner)};
      starts = block.start;
    }
    kernels::GradientParams p = g_.memory_.params(pass_, args_);
    g_.memory_.give_key_sums(p, sums, starts);
    p.resume_rows = !is_own;
    g_.layer_.kernels.attend_gradients(p, run.stream, between);
  }

  void arrived(const Move& move) override {
    if (move.what != Move::results || !move.receives) return;
    const GradientMemory::KeySums own = g_.memory_.own_keys(pass_.run);
    g_.memory_.add(own.data, g_.returning_.arrived(move.slot), g_.memory_.key_sum_bytes(own.rows),
                   pass_.run.stream);
  }

  void finish() override { g_.memory_.store(pass_.run, args_, pass_.attend.tokens); }

 private:
  const KeyGradients& g_;
  Pass& pass_;
  const GradientArgs& args_;
  const KeyBlock& own_;
};

KeyGradients::KeyGradients(const LayerContext& layer, const TravellingKeys& keys)
    : layer_(layer),
      keys_(keys),
      memory_(layer, keys),
      returning_(layer.comm),
      key_steps_(1),
      route_(ranks()),
      underway_(ranks()) {
  for (int s = 1; s < ranks(); ++s) {
    key_steps_.push_back(fmt::format("backward, ring of keys, step {} of {}", s, ranks() - 1));
  }
}

double KeyGradients::workspace_bytes(const Options& options, int ranks, const RunSize& size) {
  if (!options.gradients) return 0;
  const double own = GradientMemory::workspace_bytes(options, ranks, size);
  if (ranks == 1) return own;
  const double keys = most_keys_of_a_rank(options.keys, size.keys, ranks);
  return own + 2 * ReturningSums::kSlots * GradientMemory::key_sum_bytes(options, keys) +
         (1 + kSlots) * keys * key_row_bytes(options);
}

void KeyGradients::lay_out(Parts& memory) {
  memory_.lay_out(memory);
  if (ranks() == 1) return;
  const std::int64_t rows = keys_.block_rows();
  for (KeyBlock& guest : guests_) guest = keys_.take_block(memory, rows);
  copy_ = keys_.take_block(memory, rows);
  returning_.lay_out(memory, memory_.key_sum_bytes(rows));
}

void KeyGradients::backward(Pass& pass, const GradientArgs& args) {
  const Run& run = pass.run;
  pass.write_own_digest(layer_.kernels);
  keys_.begin(pass);
  memory_.begin(pass, args);
  const KeyBlock own = ranks() == 1 ? KeyBlock() : keys_.own_keys(run, copy_);
  Backward visitor(*this, pass, args, own);
  if (ranks() == 1) {
    visitor.visit({.kind = Step::visit}, {});
    return visitor.finish();
  }
  make_ring(
      {.ranks = ranks(),
       .rank = rank(),
       .slots = kSlots,
       .digests_first = true,
       .returns_results = true},
      [&](int owner, int receiver) { return keys_.are_seen(run, receiver, owner); }, route_);
  walk(route_, pass, layer_.comm, "backward, agreement", underway_, visitor);
}

comm::Transfers KeyGradients::start_keys(const Run& run, const Move& move,
                                         const KeyBlock& own) const {
  const KeyBlock& to = guests_[at(move.slot)];
  const int from = rank_at(-move.distance);
  std::array<comm::Piece, 3> pieces;
  std::size_t count = 0;
  const auto add = [&](const void* sent, void* received, std::int64_t row_bytes) {
    pieces[count++] = {sent, move.sends ? at(keys_.rows_of(run, rank()) * row_bytes) : 0, received,
                       move.receives ? at(keys_.rows_of(run, from) * row_bytes) : 0};
  };
  add(own.k, to.k, keys_.key_bytes());
  add(own.v, to.v, keys_.value_bytes());
  if (to.positions != nullptr) add(own.positions, to.positions, sizeof(std::int64_t));
  return layer_.comm.start_shifts({pieces.data(), count}, move.distance, run.stream,
                                  key_steps_[at(move.distance)].c_str());
}

}  // namespace longspan
