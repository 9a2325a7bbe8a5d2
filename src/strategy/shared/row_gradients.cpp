#include "src/strategy/shared/row_gradients.hpp"

#include <fmt/format.h>

#include "src/arguments/tensor_checks.hpp"

namespace longspan {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

}  // namespace

/// Attends backward with each rank's rows in turn.
class RowGradients::Backward final : public Visitor {
 public:
  Backward(const RowGradients& gradients, const Pass& pass, const GradientArgs& args,
           const Rows& own)
      : g_(gradients), pass_(pass), args_(args), own_(own) {}

  comm::Transfers start(const Move& move) override {
    return move.what == Move::blocks
               ? g_.start_rows(pass_.run, args_, move, own_)
               : g_.returning_.start(move, pass_.run.stream, [this](int owner) {
                   return g_.memory_.row_sum_bytes(g_.rows_.rows_of(pass_.run, owner));
                 });
  }

  void visit(const Step& step, const kernels::BetweenTiles& between) override {
    const Run& run = pass_.run;
    const kernels::AttendParams& bounds = g_.layer_.bounds;
    kernels::GradientParams p = g_.memory_.params(pass_, args_);
    g_.memory_.give_key_sums(p, g_.memory_.own_keys(run), g_.memory_.own_key_starts());
    if (step.guest != Step::kOwn) {
      const int owner = g_.rank_at(-step.guest);
      const Rows& guest = g_.guests_[at(step.slot)];
      p.tokens = g_.rows_.rows_of(run, owner);
      p.queries = run.arrays.queries.with_rank(owner);
      if (run.arrays.query_start != nullptr) p.batch.query_start = g_.starts_of(run, owner);
      p.q = {guest.q, std::int64_t{bounds.heads} * bounds.head_dim, bounds.head_dim};
      p.dout = {guest.dout, std::int64_t{bounds.heads} * bounds.value_dim, bounds.value_dim};
      p.terms = guest.terms;
      p.dq = g_.memory_.row_sums(g_.returning_.leaving(step.result_slot), p.tokens);
      p.resume_keys = true;
    }
    g_.layer_.kernels.attend_gradients(p, run.stream, between);
  }

  void arrived(const Move& move) override {
    if (move.what != Move::results || !move.receives) return;
    const std::int64_t rows = pass_.attend.tokens;
    g_.memory_.add(g_.memory_.own_rows(rows).data, g_.returning_.arrived(move.slot),
                   g_.memory_.row_sum_bytes(rows), pass_.run.stream);
  }

  void finish() override { g_.memory_.store(pass_.run, args_, pass_.attend.tokens); }

 private:
  const RowGradients& g_;
  const Pass& pass_;
  const GradientArgs& args_;
  const Rows& own_;
};

RowGradients::RowGradients(const LayerContext& layer, const DealtRows& rows)
    : layer_(layer),
      rows_(rows),
      keys_(layer),
      memory_(layer, keys_),
      returning_(layer.comm),
      row_steps_(1),
      route_(ranks()),
      underway_(ranks()) {
  for (int s = 1; s < ranks(); ++s) {
    row_steps_.push_back(fmt::format("backward, ring of rows, step {} of {}", s, ranks() - 1));
  }
}

double RowGradients::workspace_bytes(const Options& options, int ranks, const RunSize& size) {
  if (!options.gradients) return 0;
  const double own = GradientMemory::workspace_bytes(options, ranks, size);
  if (ranks == 1) return own;
  const double rows = options.queries ? size.most_tokens : size.tokens;
  const double dout = rows * options.heads * options.of_values() * 4.0;
  const double terms = rows * options.heads * sizeof(kernels::RowTerm);
  return own + dout + kSlots * (rows * query_row_bytes(options) + dout + terms) +
         2 * ReturningSums::kSlots * GradientMemory::row_sum_bytes(options, rows);
}

void RowGradients::lay_out(Parts& memory) {
  memory_.lay_out(memory);
  if (ranks() == 1) return;
  const std::int64_t rows = layer_.bounds.tokens;
  starts_ =
      memory.take_array<std::int32_t>(at(std::int64_t{ranks()} * (layer_.bounds.batch.size + 1)));
  packed_dout_ = memory.take(at(rows * dout_bytes(fp32)));
  for (Rows& guest : guests_)
    guest = {memory.take(at(rows * rows_.row_bytes())), memory.take(at(rows * dout_bytes(fp32))),
             memory.take_array<kernels::RowTerm>(at(rows * layer_.bounds.heads))};
  returning_.lay_out(memory, memory_.row_sum_bytes(rows));
}

void RowGradients::find_starts(Pass& pass) const {
  const Run& run = pass.run;
  if (run.arrays.query_start == nullptr) return;
  for (int p = 0; p < ranks(); ++p)
    layer_.kernels.row_starts({run.arrays.queries.with_rank(p), run.arrays.query_start,
                               run.arrays.batch, starts_of(run, p)},
                              run.stream);
  pass.attend.batch.query_start = starts_of(run, rank());
}

void RowGradients::backward(Pass& pass, const GradientArgs& args) {
  const Run& run = pass.run;
  pass.write_own_digest(layer_.kernels);
  if (ranks() > 1) {
    pass.attend.tokens = std::min(pass.attend.tokens, rows_.rows_of(run, rank()));
    find_starts(pass);
  }
  memory_.begin(pass, args);
  const Rows own = ranks() == 1 ? Rows() : own_rows(run, args);
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
      [&](int rows, int keys) {
        return rows_.rows_of(run, rows) > 0 && may_see(run, layer_.kernels.device(), rows, keys);
      },
      route_);
  walk(route_, pass, layer_.comm, "backward, agreement", underway_, visitor);
}

RowGradients::Rows RowGradients::own_rows(const Run& run, const GradientArgs& args) const {
  const Tensor& dout = args.dout;
  const int dim = layer_.bounds.value_dim;
  Rows own{static_cast<std::byte*>(run.args.q.data), static_cast<std::byte*>(dout.data),
           memory_.terms()};
  const bool dense =
      dout.stride[1] == dim && dout.stride[0] == std::int64_t{layer_.bounds.heads} * dim;
  if (dense) return own;
  const StorageFormat stored = storage_of(dout.dtype);
  for (int head = 0; head < layer_.bounds.heads; ++head) {
    const StridedCopy copy{own.dout + stored.bytes(head * dout.stride[1]),
                           packed_dout_ + stored.bytes(std::int64_t{head} * dim),
                           stored.bytes(dout.stride[0]),
                           dout_bytes(dout.dtype),
                           stored.row_bytes(dim),
                           rows_.rows_of(run, rank())};
    layer_.kernels.copy_rows({&copy, 1}, run.stream);
  }
  own.dout = packed_dout_;
  return own;
}

comm::Transfers RowGradients::start_rows(const Run& run, const GradientArgs& args, const Move& move,
                                         const Rows& own) const {
  const Rows& to = guests_[at(move.slot)];
  const int from = rank_at(-move.distance);
  const auto piece = [&](const void* sent, void* received, std::int64_t row_bytes) {
    return comm::Piece{sent, move.sends ? at(rows_.rows_of(run, rank()) * row_bytes) : 0, received,
                       move.receives ? at(rows_.rows_of(run, from) * row_bytes) : 0};
  };
  const std::array pieces{piece(own.q, to.q, rows_.row_bytes()),
                          piece(own.dout, to.dout, dout_bytes(args.dout.dtype)),
                          piece(own.terms, to.terms, term_bytes())};
  return layer_.comm.start_shifts(pieces, move.distance, run.stream,
                                  row_steps_[at(move.distance)].c_str());
}

}  // namespace longspan
