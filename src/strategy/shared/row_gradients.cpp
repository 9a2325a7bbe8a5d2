#include "src/strategy/shared/row_gradients.hpp"

#include <algorithm>

#include "longspan/error.hpp"
#include "src/arguments/tensor_checks.hpp"
#include "src/base/at.hpp"

namespace longspan {

/// Attends backward with each rank's rows in turn.
class RowGradients::Backward final : public Visitor {
 public:
  Backward(const RowGradients& gradients, const Pass& pass, const GradientArgs& args,
           const Rows& own)
      : g_(gradients), pass_(pass), args_(args), own_(own) {}

  comm::Transfers start(const Move& move) override {
    const Run& run = pass_.run;
    const auto rows_of = [&](int owner) { return g_.rows_.rows_of(run, owner); };
    if (move.what == Move::results)
      return g_.ring_.start_results(
          move, run.stream, [&](int owner) { return g_.memory_.row_sum_bytes(rows_of(owner)); });
    const Rows& to = g_.guests_[at(move.slot)];
    const auto piece = [&](const void* sent, void* received, std::int64_t row_bytes) {
      return g_.ring_.piece(move, sent, received,
                            [&](int owner) { return rows_of(owner) * row_bytes; });
    };
    const std::array pieces{piece(own_.q, to.q, g_.rows_.row_bytes()),
                            piece(own_.dout, to.dout, g_.dout_bytes(args_.dout.dtype)),
                            piece(own_.terms, to.terms, g_.term_bytes())};
    return g_.ring_.start(pieces, move, run.stream);
  }

  void visit(const Step& step, const kernels::BetweenTiles& between) override {
    const Run& run = pass_.run;
    const kernels::AttendParams& bounds = g_.layer_.bounds;
    kernels::GradientParams p = g_.memory_.params(pass_, args_);
    g_.memory_.give_key_sums(p, g_.memory_.own_keys(run), g_.memory_.own_key_starts());
    p.dq = g_.memory_.own_rows(g_.sum_rows(run));
    if (step.guest != Step::kOwn) {
      const int owner = g_.ring_.rank_at(-step.guest);
      const Rows& guest = g_.guests_[at(step.slot)];
      p.tokens = g_.rows_.rows_of(run, owner);
      p.queries = run.arrays.queries.with_rank(owner);
      g_.starts_.give(run, owner, p.batch);
      p.q = {guest.q, std::int64_t{bounds.heads} * bounds.head_dim, bounds.head_dim};
      p.dout = {guest.dout, std::int64_t{bounds.heads} * bounds.value_dim, bounds.value_dim};
      p.terms = guest.terms;
      p.dq = g_.memory_.row_sums(g_.ring_.leaving(step.result_slot), p.tokens);
      p.resume_keys = !g_.ring_.keeps();
      if (g_.ring_.keeps())
        g_.memory_.give_key_sums(p,
                                 {g_.ring_.with_guests().of(owner), g_.memory_.own_keys(run).rows},
                                 g_.memory_.own_key_starts());
    }
    if (step.guest == Step::kOwn) stored_ = g_.memory_.store_by_kernels(p, pass_, args_);
    g_.layer_.kernels.attend_gradients(p, run.stream, between);
  }

  void arrived(const Move& move) override {
    if (move.what != Move::results || !move.receives || g_.ring_.keeps()) return;
    const std::int64_t rows = g_.sum_rows(pass_.run);
    g_.memory_.add(g_.memory_.own_rows(rows).data, g_.ring_.arriving(move),
                   g_.memory_.row_sum_bytes(rows), pass_.run.stream);
  }

  void finish() override {
    if (g_.ring_.keeps()) fold();
    g_.memory_.finish(pass_, args_, g_.sum_rows(pass_.run), stored_);
  }

  /// Folds the gradients that were kept apart: of own rows over the keys of all ranks, and of own
  /// keys over their rows.
  void fold() const {
    const Run& run = pass_.run;
    const Options& options = g_.layer_.options;
    const int rank = g_.layer_.comm.rank();
    const std::int64_t rows = g_.sum_rows(run);
    g_.ring_.returned().fold(
        options.keys, reinterpret_cast<std::byte*>(g_.memory_.own_rows(rows).data),
        g_.memory_.row_sum_bytes(rows), [&](int other) { return g_.is_wanted(run, rank, other); },
        run.stream);
    const GradientMemory::KeySums keys = g_.memory_.own_keys(run);
    g_.ring_.with_guests().fold(
        *options.queries, keys.data, g_.memory_.key_sum_bytes(keys.rows),
        [&](int other) { return g_.is_wanted(run, other, rank); }, run.stream);
  }

 private:
  const RowGradients& g_;
  const Pass& pass_;
  const GradientArgs& args_;
  const Rows& own_;
  bool stored_ = false;  // by the kernels
};

RowGradients::RowGradients(const LayerContext& layer, const DealtRows& rows,
                           const RowStarts& starts)
    : layer_(layer),
      rows_(rows),
      starts_(starts),
      keys_(layer),
      memory_(layer, keys_),
      ring_(layer, "rows") {}

double RowGradients::workspace_bytes(const Options& options, int ranks, const RunSize& size,
                                     Device device) {
  if (!options.gradients) return 0;
  const double own = GradientMemory::workspace_bytes(options, ranks, size);
  if (ranks == 1) return own;
  const double rows = options.queries ? size.most_tokens : size.tokens;
  const double dout = rows * options.heads * options.of_values() * 4.0;
  const double terms = rows * options.heads * sizeof(kernels::RowTerm);
  const double keys = most_keys_of_a_rank(options.keys, size.keys, ranks);
  const double queries = rows * query_row_bytes(options);
  const double packed = dout + (device == Device::host ? 0 : queries);
  return own + packed + GradientRing::kSlots * (queries + dout + terms) +
         GradientRing::workspace_bytes(options, ranks, GradientMemory::row_sum_bytes(options, rows),
                                       GradientMemory::key_sum_bytes(options, keys));
}

/// dout has the type of out. Everything travels beside an attention but the dq of the last guest.
/// Under invariant the gradients of keys add up apart too.
BackwardCost RowGradients::cost(const Options& options, int ranks, const RunSize& size) {
  if (!options.gradients || ranks == 1) return {};
  const double rows = options.queries ? size.most_tokens : size.tokens, others = ranks - 1;
  const double dout = static_cast<double>(
      storage_of(options.dtypes.of_out()).bytes(std::int64_t{options.heads} * options.of_values()));
  const double terms = 1.0 * options.heads * sizeof(kernels::RowTerm);
  const double sums = GradientMemory::row_sum_bytes(options, rows);
  const double keys = GradientMemory::key_sum_bytes(options, size.keys / ranks);
  const double received = others * (rows * (query_row_bytes(options) + dout + terms) + sums);
  return {.received_bytes = received,
          .overlapped_bytes = received - sums,
          .messages = 2,
          .calls = static_cast<double>(ranks),
          .copied_bytes = others * (sums + (options.invariant ? keys : 0))};
}

void RowGradients::lay_out(Parts& memory) {
  memory_.lay_out(memory);
  const std::int64_t rows = layer_.bounds.tokens;
  ring_.lay_out(memory, memory_.row_sum_bytes(rows), memory_.key_sum_bytes(keys_.block_rows()));
  if (layer_.comm.size() == 1) return;
  if (is_on_gpu()) packed_q_ = memory.take(at(rows * rows_.row_bytes()));
  packed_dout_ = memory.take(at(rows * dout_bytes(fp32)));
  for (Rows& guest : guests_)
    guest = {memory.take(at(rows * rows_.row_bytes())), memory.take(at(rows * dout_bytes(fp32))),
             memory.take_array<kernels::RowTerm>(at(rows * layer_.bounds.heads))};
}

void RowGradients::backward(Pass& pass, const GradientArgs& args) {
  const Run& run = pass.run;
  pass.write_own_digest(layer_.kernels);
  starts_.find(run);
  starts_.give(run, layer_.comm.rank(), pass.attend.batch);
  pass.attend.tokens = std::min(pass.attend.tokens, sum_rows(run));
  memory_.begin(pass, args);
  const Rows own = layer_.comm.size() == 1 ? Rows() : own_rows(pass, args);
  Backward visitor(*this, pass, args, own);
  ring_.walk(
      pass, [&](int rows, int keys) { return is_wanted(run, rows, keys); }, visitor);
}

bool RowGradients::is_wanted(const Run& run, int rows, int keys) const {
  return rows_.rows_of(run, rows) > 0 && may_see(run, layer_.kernels.device(), rows, keys);
}

std::int64_t RowGradients::sum_rows(const Run& run) const {
  return layer_.comm.size() == 1 ? run.attend.tokens : rows_.rows_of(run, layer_.comm.rank());
}

RowGradients::Rows RowGradients::own_rows(const Pass& pass, const GradientArgs& args) const {
  const Run& run = pass.run;
  const Tensor& dout = args.dout;
  const int dim = layer_.bounds.value_dim;
  Rows own{static_cast<std::byte*>(run.args.q.data), static_cast<std::byte*>(dout.data),
           memory_.terms(pass)};
  const std::int64_t rows = pass.attend.tokens;
  const bool are_fewer = rows < sum_rows(run);  // than travel
  if (are_fewer) {
    layer_.kernels.place_rows({own.q, packed_q_, nullptr, rows, rows_.row_bytes()}, run.stream);
    own.q = packed_q_;
  }
  // The dimension of rows; before it is that of sequences that lie apart.
  const int first = dout.dims - 3;
  const std::int64_t step = dout.stride[first], head_step = dout.stride[first + 1];
  const bool dense =
      first == 0 && head_step == dim && step == std::int64_t{layer_.bounds.heads} * dim;
  if (dense && !are_fewer) return own;
  const StorageFormat stored = storage_of(dout.dtype);
  const std::int64_t sequences = first == 0 ? 1 : dout.shape[0],
                     length = first == 0 ? rows : dout.shape[1];
  for (std::int64_t b = 0; b < sequences; ++b) {
    const std::byte* const from = own.dout + (first == 0 ? 0 : stored.bytes(b * dout.stride[0]));
    std::byte* const to = packed_dout_ + b * length * dout_bytes(dout.dtype);
    for (int head = 0; head < layer_.bounds.heads; ++head) {
      const StridedCopy copy{from + stored.bytes(head * head_step),
                             to + stored.bytes(std::int64_t{head} * dim),
                             stored.bytes(step),
                             dout_bytes(dout.dtype),
                             stored.row_bytes(dim),
                             std::clamp<std::int64_t>(rows - b * length, 0, length)};
      layer_.kernels.copy_rows({&copy, 1}, run.stream);
    }
  }
  own.dout = packed_dout_;
  return own;
}

}  // namespace longspan
