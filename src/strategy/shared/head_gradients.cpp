#include "src/strategy/shared/head_gradients.hpp"

#include <algorithm>

#include "src/arguments/tensor_checks.hpp"
#include "src/base/at.hpp"

namespace longspan {
namespace {

using kernels::GradientSums;
using kernels::PackOutputsParams;

float* floats(std::byte* bytes) { return reinterpret_cast<float*>(bytes); }

/// The rows of some heads of a kv head, from its head `first` of the group on.
kernels::TokenRows rows_of_group(const GradientSums& sums, int kv_head, int group, int first) {
  const std::int64_t row = GradientSums::padded(sums.dim);
  return {sums.at(kv_head, first), group * row, row};
}

/// Rows of `of_heads` heads, from their head `first` on.
kernels::TokenRows heads_of(std::byte* rows, int of_heads, int first, int dim) {
  return {floats(rows) + std::int64_t{first} * dim, std::int64_t{of_heads} * dim, dim};
}

/// The most keys of whole sequences in a run.
std::int64_t most_whole_keys(const LayerContext& layer) {
  return most_keys(layer.options.limits, layer.bounds.batch.size);
}

}  // namespace

HeadGradients::HeadGradients(const LayerContext& layer, const HeadExchange& exchange)
    : layer_(layer),
      exchange_(exchange),
      starts_(layer),
      memory_(layer, exchange.keys(), has_nodes() ? nullptr : &exchange.own_layer().bounds) {}

double HeadGradients::workspace_bytes(const Options& options, int ranks, const RunSize& size,
                                      bool several_nodes) {
  if (!options.gradients) return 0;
  const MostHeads most = most_heads(options.heads, options.kv_heads, ranks);
  Options own = options;
  own.heads = most.query;
  own.kv_heads = most.kv;
  const double rows = options.queries ? ranks * size.most_tokens : size.tokens;
  const double sums =
      GradientMemory::row_sum_bytes(own, rows) + GradientMemory::key_sum_bytes(own, size.keys);
  return GradientMemory::workspace_bytes(options, ranks, size) +
         rows * most.query *
             ((options.queries ? 4.0 * options.of_values() : 0) + sizeof(kernels::RowTerm)) +
         (several_nodes ? 0 : sums) +
         ranks * most_keys_of_a_rank(options.keys, size.keys, ranks) * sizeof(std::int64_t);
}

/// Slots have room for the most heads. dout has the type of out.
BackwardCost HeadGradients::cost(const Options& o, int ranks, const RunSize& size) {
  if (!o.gradients || ranks == 1) return {};
  const MostHeads most = most_heads(o.heads, o.kv_heads, ranks);
  const double rows = (o.queries ? size.most_tokens : size.tokens) * most.query;
  const double keys = size.keys / ranks * most.kv;
  const auto row_bytes = [](DType dtype, int dim) {
    return static_cast<double>(storage_of(dtype).row_bytes(dim));
  };
  const DType kv = o.dtypes.of_kv();
  const double come = row_bytes(o.dtypes.of_query(), o.head_dim) +
                      row_bytes(o.dtypes.of_out(), o.of_values()) + sizeof(kernels::RowTerm);
  const double slots = rows * ((o.queries ? come : 0) + row_bytes(fp32, o.head_dim)) +
                       keys * (row_bytes(kv, o.head_dim) + row_bytes(kv, o.of_values()) +
                               row_bytes(fp32, GradientSums::padded(o.head_dim)) +
                               row_bytes(fp32, GradientSums::padded(o.of_values())));
  return {.received_bytes = (ranks - 1) * slots,
          .messages = o.queries ? 8.0 : 5.0,  // q, dout and row terms; k, v, dq, dk and dv
          .copied_bytes = 2 * ranks * slots};
}

void HeadGradients::lay_out(Parts& memory) {
  starts_.lay_out(memory);
  memory_.lay_out(memory);
  const std::int64_t rows = exchange_.most_tokens(), keys = most_whole_keys(layer_);
  const kernels::AttendParams& own = exchange_.own_layer().bounds;
  if (gathers_rows())
    dout_ = memory.take(at(rows * heads() * storage_of(fp32).row_bytes(own.value_dim)));
  terms_ = memory.take_array<kernels::RowTerm>(at(rows * heads()));
  key_map_ = memory.take_array<std::int64_t>(at(exchange_.peers() * exchange_.keys().block_rows()));
  if (has_nodes()) return;
  dq_ =
      memory.take(at(GradientSums::bytes(rows * (heads() / kv_heads()), kv_heads(), own.head_dim)));
  dk_ = memory.take(at(GradientSums::bytes(keys, kv_heads(), own.head_dim)));
  dv_ = memory.take(at(GradientSums::bytes(keys, kv_heads(), own.value_dim)));
}

void HeadGradients::backward(Pass& pass, const GradientArgs& args) const {
  backward(pass, args, [this](const Pass& own, const Tensor& dout) { return attend(own, dout); });
}

void HeadGradients::backward(Pass& pass, const GradientArgs& args,
                             const BetweenNodes& between) const {
  bring(pass, args);
  Pass own = pass;
  own.terms = terms_;
  give_back(pass, args, between(own, dout_of(pass, args)));
}

void HeadGradients::give_back(const Pass& pass, const GradientArgs& args,
                              const Gradients& gradients) const {
  const Run& run = pass.run;
  return_rows(pass, gradients.dq);
  find_key_map(pass);
  kernels::GradientParams own;
  memory_.give_key_sums(own, memory_.own_keys(run), nullptr);
  return_keys(pass, gradients.dk, own.dk, "backward, exchange of dk");
  return_keys(pass, gradients.dv, own.dv, "backward, exchange of dv");
  Pass of_own_rows = pass;
  if (gathers_rows()) starts_.give(run, layer_.comm.rank(), of_own_rows.attend.batch);
  memory_.finish(of_own_rows, args, run.attend.tokens);
}

/// Receives all rows and keys of this rank's heads.
void HeadGradients::bring(Pass& pass, const GradientArgs& args) const {
  pass.write_own_digest(layer_.kernels);
  const KeyBlock keys = exchange_.ready_keys(pass);
  exchange_.find_places(pass);
  Pass own(pass.run);
  if (gathers_rows()) {
    starts_.find(pass.run);
    starts_.give(pass.run, layer_.comm.rank(), own.attend.batch);
  }
  memory_.begin(own, args);
  if (gathers_rows()) {
    exchange_.exchange_queries(pass);
    exchange_.exchange_rows(pass, token_rows_of(args.dout), layer_.bounds.value_dim,
                            args.dout.dtype, dout_, "backward, exchange of dout");
  }
  bring_terms(pass, own);
  for (const int i : {0, 1}) exchange_.exchange_keys(pass, keys, i);
  exchange_.attend_to_own(pass);
}

/// Receives the terms of all rows of this rank's heads; with replicated rows they are here.
void HeadGradients::bring_terms(const Pass& pass, const Pass& own) const {
  constexpr int kFloats = HeadExchange::kTermFloats;
  const auto dense = [](kernels::RowTerm* terms, int of_heads) {
    return kernels::TokenRows(terms, std::int64_t{of_heads} * kFloats, kFloats);
  };
  const kernels::TokenRows terms = dense(memory_.terms(own), layer_.bounds.heads);
  if (gathers_rows())
    return exchange_.exchange_rows(pass, terms, kFloats, fp32, reinterpret_cast<std::byte*>(terms_),
                                   "backward, exchange of row terms");
  PackOutputsParams pack;
  pack.dim = kFloats;
  pack.dtype = fp32;
  pack.tokens = pass.attend.tokens;
  pack.heads = heads();
  pack.from = dense(memory_.terms(own) + exchange_.share().query.begin, layer_.bounds.heads);
  pack.to = dense(terms_, heads());
  layer_.kernels.pack_outputs(pack, pass.run.stream);
}

/// The dout of all rows, this rank's heads.
Tensor HeadGradients::dout_of(const Pass& pass, const GradientArgs& args) const {
  Tensor dout = args.dout;
  const int dim = layer_.bounds.value_dim;
  if (gathers_rows()) {
    dout = Tensor(dout_, args.dout.dtype, {pass.attend.tokens, heads(), dim});
    dout.device = args.dout.device;
    return dout;
  }
  const int of_heads = dout.dims - 2;
  dout.shape[of_heads] = heads();
  dout.data = static_cast<std::byte*>(dout.data) +
              storage_of(dout.dtype).bytes(exchange_.share().query.begin * dout.stride[of_heads]);
  return dout;
}

/// Computes the gradients of this rank's heads, over whole sequences.
Gradients HeadGradients::attend(const Pass& pass, const Tensor& dout) const {
  GradientArgs args;
  args.dout = dout;
  kernels::GradientParams p = memory_.params(pass, args);
  const std::int64_t keys = [&] {
    std::int64_t count = 0;
    for (int rank = 0; rank < exchange_.peers(); ++rank)
      count += exchange_.keys().rows_of(pass.run, rank);
    return std::min(count, most_whole_keys(layer_));
  }();
  if (gathers_rows()) {  // all rows are here, and fold as those of one rank
    const Shard& rows = pass.run.arrays.queries;
    p.queries = {.layout = rows.layout, .length = rows.length, .block = rows.block};
  }
  p.dq = {floats(dq_), p.tokens * (p.heads / p.kv_heads), p.head_dim};
  p.dk = {floats(dk_), keys, p.head_dim};
  p.dv = {floats(dv_), keys, p.value_dim};
  layer_.kernels.attend_gradients(p, pass.run.stream);
  return {p.dq, p.dk, p.dv};
}

/// Sends the dq of each row to its rank, or that of replicated rows to all ranks of the exchange:
/// [rows, heads of the sender, head_dim].
void HeadGradients::return_rows(const Pass& pass, const GradientSums& sums) const {
  const Run& run = pass.run;
  const int dim = layer_.bounds.head_dim, group = heads() / kv_heads();
  const std::int64_t most = gathers_rows() ? exchange_.rows().capacity(run) : run.attend.tokens;
  const std::int64_t slot = exchange_.row_slot(most, dim, fp32);
  PackOutputsParams pack;
  pack.dim = dim;
  pack.dtype = fp32;
  pack.tokens = most;
  pack.heads = group;
  std::byte* to = exchange_.arriving() + exchange_.peer() * slot;
  if (gathers_rows()) {
    pack.tokens *= exchange_.peers();
    pack.map = exchange_.rows().map();
    pack.map_of = PackOutputsParams::MapOf::sources;
    to = exchange_.leaving();
  }
  for (int j = 0; j < kv_heads(); ++j) {
    pack.from = rows_of_group(sums, j, group, 0);
    pack.to = heads_of(to, heads(), j * group, dim);
    if (gathers_rows())
      pack.to.gap = {slot / 4 - most * heads() * dim, static_cast<std::uint32_t>(most)};
    layer_.kernels.pack_outputs(pack, run.stream);
  }
  if (gathers_rows())
    exchange_.all_to_all(pass, slot, "backward, exchange of dq");
  else
    exchange_.gather(pass, slot, "backward, gather of dq");
  put_rows(run, most, slot);
}

/// Puts the received dq of this rank's rows side by side, from slots of that size with room for
/// `most` rows.
void HeadGradients::put_rows(const Run& run, std::int64_t most, std::int64_t slot) const {
  const int dim = layer_.bounds.head_dim;
  const int whole_group = layer_.bounds.heads / layer_.bounds.kv_heads;
  PackOutputsParams pack;
  pack.dim = dim;
  pack.dtype = fp32;
  pack.tokens = std::min(run.attend.tokens, most);
  for (int p = 0; p < exchange_.peers(); ++p) {
    const HeadShare share = exchange_.share_of(p);
    pack.heads = share.query.size() / share.kv.size();
    for (int j = 0; j < share.kv.size(); ++j) {
      const int kv_head = share.kv.begin + j, head = share.query.begin + j * pack.heads;
      pack.from =
          heads_of(exchange_.arriving() + p * slot, share.query.size(), j * pack.heads, dim);
      pack.to = rows_of_group(memory_.own_rows(run.attend.tokens), kv_head, whole_group,
                              head - kv_head * whole_group);
      layer_.kernels.pack_outputs(pack, run.stream);
    }
  }
}

/// Computes which of the sequences' keys each rank has.
void HeadGradients::find_key_map(const Pass& pass) const {
  const Run& run = pass.run;
  kernels::MapParams map;
  map.shard = run.arrays.keys;
  map.batch = pass.attend.batch;  // with the starts of sequences, or of the node's part of them
  map.ranks = exchange_.peers();
  map.first = exchange_.ranks().first;
  map.part = part_of_node(run.arrays.keys, exchange_.ranks());
  map.capacity = exchange_.most_keys(run);
  map.map = key_map_;
  map.of_keys = true;
  layer_.kernels.map_rows(map, run.stream);
}

/// Sends the gradients of each key to its rank, in the form of GradientSums, and adds up those that
/// arrive.
void HeadGradients::return_keys(const Pass& pass, const GradientSums& sums, const GradientSums& own,
                                const char* step) const {
  const Run& run = pass.run;
  const std::int64_t most = exchange_.most_keys(run), slot = exchange_.key_sum_slot(most, sums.dim);
  const int row = GradientSums::padded(sums.dim);
  PackOutputsParams pack;
  pack.dim = row;
  pack.dtype = fp32;
  pack.tokens = exchange_.peers() * most;
  pack.map = key_map_;
  pack.map_of = PackOutputsParams::MapOf::sources;
  for (int j = 0; j < kv_heads(); ++j) {
    pack.from = rows_of_group(sums, j, 1, 0);
    pack.to = {floats(exchange_.leaving()) + j * most * row, row, row};
    pack.to.gap = {slot / 4 - most * row, static_cast<std::uint32_t>(most)};
    layer_.kernels.pack_outputs(pack, run.stream);
  }
  exchange_.all_to_all(pass, slot, step);

  int next = 0;  // kv heads before it have the gradients of some rank
  for (int p = 0; p < exchange_.peers(); ++p) {
    const HeadRange kv = exchange_.share_of(p).kv;
    for (int j = 0; j < kv.size(); ++j) {
      const std::int64_t bytes = own.rows * row * 4;
      const std::byte* const from =
          exchange_.arriving() + p * slot + std::int64_t{j} * most * row * 4;
      float* const to = own.at(kv.begin + j, 0);
      if (kv.begin + j < next)
        memory_.add(to, from, bytes, run.stream);
      else
        layer_.kernels.place_rows(
            {from, reinterpret_cast<std::byte*>(to), nullptr, own.rows, std::int64_t{row} * 4},
            run.stream);
    }
    next = kv.end;
  }
}

}  // namespace longspan
