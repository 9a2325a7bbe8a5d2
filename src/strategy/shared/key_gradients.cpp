#include "src/strategy/shared/key_gradients.hpp"

#include "src/base/at.hpp"

namespace longspan {

/// Attends backward to each block of keys in turn.
class KeyGradients::Backward final : public Visitor {
 public:
  Backward(const KeyGradients& gradients, Pass& pass, const GradientArgs& args, const KeyBlock& own)
      : g_(gradients), pass_(pass), args_(args), own_(own) {}

  comm::Transfers start(const Move& move) override {
    const Run& run = pass_.run;
    if (move.what == Move::results)
      return g_.ring_.start_results(move, run.stream, [&](int owner) {
        return g_.memory_.key_sum_bytes(g_.keys_.rows_of(run, owner));
      });
    std::array<comm::Piece, TravellingKeys::kPieces> pieces;
    const std::size_t count =
        g_.keys_.list_pieces(run, move, own_, g_.guests_[at(move.slot)], pieces.data());
    return g_.ring_.start({pieces.data(), count}, move, run.stream);
  }

  void visit(const Step& step, const kernels::BetweenTiles& between) override {
    const Run& run = pass_.run;
    const bool is_own = step.guest == Step::kOwn;
    GradientMemory::KeySums sums = g_.memory_.own_keys(run);
    const std::int64_t* starts = g_.memory_.own_key_starts();
    const int owner = g_.ring_.rank_at(-step.guest);
    if (!is_own) {
      const KeyBlock& block = g_.guests_[at(step.slot)];
      g_.keys_.find_starts(run, owner, block);
      g_.keys_.attend_to(pass_, block, g_.keys_.shard_of(run, owner, block));
      sums = {g_.ring_.leaving(step.result_slot), g_.keys_.rows_of(run, owner)};
      starts = block.start;
    }
    kernels::GradientParams p = g_.memory_.params(pass_, args_);
    g_.memory_.give_key_sums(p, sums, starts);
    const bool apart = g_.ring_.keeps() && !is_own;
    if (apart) p.dq = g_.memory_.row_sums(g_.ring_.with_guests().of(owner), p.tokens);
    p.resume_rows = !is_own && !apart;
    if (is_own) stored_ = g_.memory_.store_by_kernels(p, pass_, args_);
    g_.layer_.kernels.attend_gradients(p, run.stream, between);
  }

  void arrived(const Move& move) override {
    if (move.what != Move::results || !move.receives || g_.ring_.keeps()) return;
    const GradientMemory::KeySums own = g_.memory_.own_keys(pass_.run);
    g_.memory_.add(own.data, g_.ring_.arriving(move), g_.memory_.key_sum_bytes(own.rows),
                   pass_.run.stream);
  }

  void finish() override {
    if (g_.ring_.keeps()) fold();
    g_.memory_.finish(pass_, args_, pass_.attend.tokens, stored_);
  }

  /// Folds the gradients that were kept apart: of own keys over the rows of all ranks, and of own
  /// rows over their keys.
  void fold() const {
    const Run& run = pass_.run;
    const Options& options = g_.layer_.options;
    const int rank = g_.layer_.comm.rank();
    const GradientMemory::KeySums keys = g_.memory_.own_keys(run);
    g_.ring_.returned().fold(
        *options.queries, keys.data, g_.memory_.key_sum_bytes(keys.rows),
        [&](int other) { return g_.keys_.are_seen(run, other, rank); }, run.stream);
    const std::int64_t rows = pass_.attend.tokens;
    g_.ring_.with_guests().fold(
        options.keys, reinterpret_cast<std::byte*>(g_.memory_.own_rows(rows).data),
        g_.memory_.row_sum_bytes(rows),
        [&](int other) { return g_.keys_.are_seen(run, rank, other); }, run.stream);
  }

 private:
  const KeyGradients& g_;
  Pass& pass_;
  const GradientArgs& args_;
  const KeyBlock& own_;
  bool stored_ = false;  // by the kernels
};

KeyGradients::KeyGradients(const LayerContext& layer, const TravellingKeys& keys)
    : layer_(layer), keys_(keys), memory_(layer, keys), ring_(layer, "keys") {}

double KeyGradients::workspace_bytes(const Options& options, int ranks, const RunSize& size) {
  if (!options.gradients) return 0;
  const double own = GradientMemory::workspace_bytes(options, ranks, size);
  if (ranks == 1) return own;
  const double keys = most_keys_of_a_rank(options.keys, size.keys, ranks);
  const double rows = options.queries ? size.most_tokens : size.tokens;
  return own +
         GradientRing::workspace_bytes(options, ranks, GradientMemory::key_sum_bytes(options, keys),
                                       GradientMemory::row_sum_bytes(options, rows)) +
         (1 + GradientRing::kSlots) * keys * key_row_bytes(options);
}

/// Everything travels beside an attention but the gradients of the last guest. Under invariant the
/// gradients of rows add up apart too.
BackwardCost KeyGradients::cost(const Options& options, int ranks, const RunSize& size) {
  if (!options.gradients || ranks == 1) return {};
  const double keys = size.keys / ranks, others = ranks - 1;
  const double sums = GradientMemory::key_sum_bytes(options, keys);
  const double received = others * (keys * key_row_bytes(options) + sums);
  const double rows = GradientMemory::row_sum_bytes(options, size.most_tokens);
  return {.received_bytes = received,
          .overlapped_bytes = received - sums,
          .messages = 2,
          .calls = static_cast<double>(ranks),
          .copied_bytes = others * (sums + (options.invariant ? rows : 0))};
}

void KeyGradients::lay_out(Parts& memory) {
  memory_.lay_out(memory);
  const std::int64_t rows = keys_.block_rows();
  ring_.lay_out(memory, memory_.key_sum_bytes(rows), memory_.row_sum_bytes(layer_.bounds.tokens));
  if (layer_.comm.size() == 1) return;
  for (KeyBlock& guest : guests_) guest = keys_.take_block(memory, rows);
  copy_ = keys_.take_block(memory, rows);
}

void KeyGradients::backward(Pass& pass, const GradientArgs& args) {
  const Run& run = pass.run;
  pass.write_own_digest(layer_.kernels);
  keys_.begin(pass);
  memory_.begin(pass, args);
  const KeyBlock own = layer_.comm.size() == 1 ? KeyBlock() : keys_.own_keys(run, copy_);
  Backward visitor(*this, pass, args, own);
  ring_.walk(
      pass, [&](int owner, int receiver) { return keys_.are_seen(run, receiver, owner); }, visitor);
}

}  // namespace longspan
