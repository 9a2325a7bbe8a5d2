#include "src/strategy/shared/key_gradients.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "longspan/error.hpp"
#include "src/arguments/tensor_checks.hpp"

namespace longspan {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

kernels::GradientParams bounds_of(const Layer& layer) {
  kernels::GradientParams bounds;
  static_cast<kernels::AttendParams&>(bounds) = layer.bounds;
  return bounds;
}

}  // namespace

std::string refuse_key_gradients(const Options& options, int ranks) {
  if (!options.gradients || ranks == 1) return "";
  if (!options.queries)
    return "its gradients are of sharded queries (Options::queries); with rows on all ranks the "
           "gradients of keys would be counted once a rank";
  if (options.invariant)
    return "its gradients are the same from run to run, not for every number of ranks (invariant)";
  return "";
}

/// Attends backward to each block of keys in turn.
class KeyGradients::Backward final : public Visitor {
 public:
  Backward(const KeyGradients& gradients, Pass& pass, const GradientArgs& args, const KeyBlock& own)
      : g_(gradients), pass_(pass), args_(args), own_(own) {}

  comm::Transfers start(const Move& move) override {
    return move.what == Move::out ? g_.start_keys(pass_.run, move, own_)
                                  : g_.start_gradients(pass_.run, move);
  }

  void visit(const Step& step, const kernels::BetweenTiles& between) override {
    const Run& run = pass_.run;
    Sums sums = g_.own_sums(run);
    const bool is_own = step.guest == Step::kOwn;
    std::int64_t* starts = g_.starts_;
    if (!is_own) {
      const int owner = g_.rank_at(-step.guest);
      const KeyBlock& block = g_.guests_[at(step.slot)];
      g_.keys_.find_starts(run, owner, block);
      g_.keys_.attend_to(pass_, block, g_.keys_.shard_of(run, owner, block));
      sums = {g_.leaving_[at(step.result_slot)], g_.keys_.rows_of(run, owner)};
      starts = block.start;
    }
    kernels::GradientParams p = g_.params(pass_, args_);
    p.key_sum_start = run.arrays.batch > 1 ? starts : nullptr;
    p.dk = g_.keys_of(sums);
    p.dv = g_.values_of(sums);
    p.resume_rows = !is_own;
    g_.layer_.kernels.attend_gradients(p, run.stream, between);
  }

  void arrived(const Move& move) override {
    if (move.what != Move::home || !move.receives) return;
    const Sums own = g_.own_sums(pass_.run);
    g_.layer_.kernels.add_sums(reinterpret_cast<float*>(own.data),
                               reinterpret_cast<const float*>(g_.arriving_[at(move.slot)]),
                               g_.sums_bytes(own.rows) / 4, pass_.run.stream);
  }

  void finish() override { g_.store(pass_.run, args_); }

 private:
  const KeyGradients& g_;
  Pass& pass_;
  const GradientArgs& args_;
  const KeyBlock& own_;
};

KeyGradients::KeyGradients(const Layer& layer, const TravellingKeys& keys)
    : layer_(layer),
      keys_(keys),
      key_steps_(1),
      gradient_steps_(1),
      route_(ranks()),
      underway_(ranks()),
      scratch_bytes_(layer.kernels.gradient_scratch(bounds_of(layer))) {
  for (int s = 1; s < ranks(); ++s) {
    key_steps_.push_back(fmt::format("backward, ring of keys, step {} of {}", s, ranks() - 1));
    gradient_steps_.push_back(
        fmt::format("backward, ring of gradients, step {} of {}", s, ranks() - 1));
  }
}

std::int64_t KeyGradients::key_sums_bytes(std::int64_t rows) const {
  return kernels::GradientSums::bytes(rows, layer_.bounds.kv_heads, layer_.bounds.head_dim);
}

std::int64_t KeyGradients::sums_bytes(std::int64_t rows) const {
  return key_sums_bytes(rows) +
         kernels::GradientSums::bytes(rows, layer_.bounds.kv_heads, layer_.bounds.value_dim);
}

kernels::GradientSums KeyGradients::keys_of(const Sums& sums) const {
  return {reinterpret_cast<float*>(sums.data), sums.rows, layer_.bounds.head_dim};
}

kernels::GradientSums KeyGradients::values_of(const Sums& sums) const {
  return {reinterpret_cast<float*>(sums.data + key_sums_bytes(sums.rows)), sums.rows,
          layer_.bounds.value_dim};
}

double KeyGradients::workspace_bytes(const Options& options, int ranks, const RunSize& size) {
  using kernels::GradientSums;
  if (!options.gradients) return 0;
  const double rows = options.queries ? size.most_tokens : size.tokens;
  const double keys = most_keys_of_a_rank(options.keys, size.keys, ranks);
  const double of_rows = rows * options.heads *
                         (sizeof(kernels::RowTerm) + 4.0 * GradientSums::padded(options.head_dim));
  const double block =
      keys * options.kv_heads * 4.0 *
      (GradientSums::padded(options.head_dim) + GradientSums::padded(options.of_values()));
  if (ranks == 1) return of_rows + block;
  return of_rows + (1 + 2 * kSlots) * block + (1 + kSlots) * keys * key_row_bytes(options);
}

void KeyGradients::lay_out(Parts& memory) {
  const kernels::AttendParams& bounds = layer_.bounds;
  const std::int64_t rows = keys_.block_rows();
  terms_ = memory.take_array<kernels::RowTerm>(at(bounds.tokens * bounds.heads));
  dq_ = memory.take(
      at(kernels::GradientSums::bytes(bounds.tokens * group(), bounds.kv_heads, bounds.head_dim)));
  own_ = memory.take(at(sums_bytes(rows)));
  starts_ = memory.take_array<std::int64_t>(at(bounds.batch.size));
  scratch_ = memory.take(scratch_bytes_);
  if (ranks() == 1) return;
  for (KeyBlock& guest : guests_) guest = keys_.take_block(memory, rows);
  copy_ = keys_.take_block(memory, rows);
  for (std::byte*& sums : leaving_) sums = memory.take(at(sums_bytes(rows)));
  for (std::byte*& sums : arriving_) sums = memory.take(at(sums_bytes(rows)));
}

void KeyGradients::make_terms(const Run& run, const GradientArgs& args) const {
  kernels::RowTermParams p;
  p.out_dtype = args.run.out.dtype;
  p.dout_dtype = args.dout.dtype;
  p.tokens = run.attend.tokens;
  p.heads = layer_.bounds.heads;
  p.value_dim = layer_.bounds.value_dim;
  p.out = token_rows_of(args.run.out);
  p.dout = token_rows_of(args.dout);
  p.lse = token_lse_of(args.run.lse);
  if (args.dlse) p.dlse = token_lse_of(args.dlse);
  p.terms = terms_;
  layer_.kernels.row_terms(p, run.stream);
}

kernels::GradientParams KeyGradients::params(const Pass& pass, const GradientArgs& args) const {
  kernels::GradientParams p;
  static_cast<kernels::AttendParams&>(p) = pass.attend;
  p.scratch = scratch_;
  p.scratch_bytes = scratch_bytes_;
  p.dout = token_rows_of(args.dout);
  p.dout_dtype = args.dout.dtype;
  p.terms = terms_;
  p.dq = {reinterpret_cast<float*>(dq_), p.tokens * group(), layer_.bounds.head_dim};
  return p;
}

void KeyGradients::backward(Pass& pass, const GradientArgs& args) {
  const Run& run = pass.run;
  pass.say_to(layer_.kernels);
  keys_.begin(pass);
  make_terms(run, args);
  if (run.arrays.batch > 1) keys_.find_starts(run, rank(), {.start = starts_});
  const KeyBlock own = ranks() == 1 ? KeyBlock() : keys_.own_keys(run, copy_);
  Backward visitor(*this, pass, args, own);
  if (ranks() == 1) {
    visitor.visit({.kind = Step::visit}, {});
    return visitor.finish();
  }
  make_ring(
      {.ranks = ranks(), .rank = rank(), .slots = kSlots, .words_first = true, .goes_home = true},
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

/// Sends the gradients of a guest home, and receives this rank's own from the rank that had its
/// keys.
comm::Transfers KeyGradients::start_gradients(const Run& run, const Move& move) const {
  const int s = ranks() - move.distance;
  const comm::Piece sums{
      leaving_[at(move.slot)],
      move.sends ? at(sums_bytes(keys_.rows_of(run, rank_at(move.distance)))) : 0,
      arriving_[at(move.slot)], move.receives ? at(sums_bytes(keys_.rows_of(run, rank()))) : 0};
  return layer_.comm.start_shifts({&sums, 1}, move.distance, run.stream,
                                  gradient_steps_[at(s)].c_str());
}

void KeyGradients::store(const Run& run, const GradientArgs& args) const {
  const kernels::AttendParams& p = run.attend;
  const auto put = [&](kernels::GradientSums sums, std::int64_t count, const Tensor& to,
                       kernels::TokenRows rows, int heads_of_group) {
    kernels::StoreGradientParams store;
    store.sums = sums;
    store.count = count;
    store.dtype = to.dtype;
    store.kv_heads = layer_.bounds.kv_heads;
    store.group = heads_of_group;
    store.to = rows;
    store.accumulate = args.accumulate;
    layer_.kernels.store_gradients(store, run.stream);
  };
  put({reinterpret_cast<float*>(dq_), p.tokens * group(), layer_.bounds.head_dim},
      p.tokens * group(), args.dq, token_rows_of(args.dq), group());

  const Sums own = own_sums(run);
  const Shard shard = run.arrays.keys;
  std::int64_t first = 0;  // row of the sums
  for (int b = 0; b < run.arrays.batch; ++b) {
    const std::int64_t count = shard.layout == Layout::listed
                                   ? own.rows
                                   : shard.for_sequence(b).local_len(p.batch.keys(b, shard));
    for (const auto& [sums, to] : {std::pair{keys_of(own), &args.dk}, {values_of(own), &args.dv}}) {
      const bool in_rows = to->dims == 4;  // [batch, capacity, kv_heads, dim]
      kernels::TokenRows rows{nullptr, to->stride[in_rows ? 1 : 0], to->stride[in_rows ? 2 : 1]};
      const std::int64_t offset = in_rows ? b * to->stride[0] : first * rows.row_stride;
      rows.data = static_cast<std::byte*>(to->data) +
                  offset * static_cast<std::int64_t>(size_of(to->dtype));
      kernels::GradientSums part = sums;
      part.data = sums.at(0, first);
      put(part, count, *to, rows, 1);
    }
    first += count;
  }
}

}  // namespace longspan
