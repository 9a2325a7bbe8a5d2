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

/// The most keys of whole sequences in a run.
std::int64_t most_whole_keys(const LayerContext& layer) {
  return most_keys(layer.options.limits, layer.bounds.batch.size);
}

}  // namespace

HeadGradients::HeadGradients(const LayerContext& layer, const HeadExchange& exchange)
    : layer_(layer),
      exchange_(exchange),
      starts_(layer),
      memory_(layer, exchange.keys(), exchange.own_layer().bounds) {}

double HeadGradients::workspace_bytes(const Options& options, int ranks, const RunSize& size) {
  if (!options.gradients) return 0;
  const MostHeads most = most_heads(options.heads, options.kv_heads, ranks);
  Options own = options;
  own.heads = most.query;
  own.kv_heads = most.kv;
  const double rows = ranks * size.most_tokens;
  return GradientMemory::workspace_bytes(options, ranks, size) +
         rows * most.query * (4.0 * options.of_values() + sizeof(kernels::RowTerm)) +
         GradientMemory::row_sum_bytes(own, rows) + GradientMemory::key_sum_bytes(own, size.keys) +
         ranks * most_keys_of_a_rank(options.keys, size.keys, ranks) * sizeof(std::int64_t);
}

/// Slots have room for the most heads. dout has the type of out.
BackwardCost HeadGradients::cost(const Options& o, int ranks, const RunSize& size) {
  if (!o.gradients || ranks == 1) return {};
  const MostHeads most = most_heads(o.heads, o.kv_heads, ranks);
  const double rows = size.most_tokens * most.query, keys = size.keys / ranks * most.kv;
  const auto row_bytes = [](DType dtype, int dim) {
    return static_cast<double>(storage_of(dtype).row_bytes(dim));
  };
  const DType kv = o.dtypes.of_kv();
  const double slots = rows * (row_bytes(o.dtypes.of_query(), o.head_dim) +
                               row_bytes(o.dtypes.of_out(), o.of_values()) +
                               sizeof(kernels::RowTerm) + row_bytes(fp32, o.head_dim)) +
                       keys * (row_bytes(kv, o.head_dim) + row_bytes(kv, o.of_values()) +
                               row_bytes(fp32, GradientSums::padded(o.head_dim)) +
                               row_bytes(fp32, GradientSums::padded(o.of_values())));
  constexpr int kExchanges = 8;  // q, dout, row terms, k, v, dq, dk and dv
  return {.received_bytes = (ranks - 1) * slots,
          .messages = kExchanges,
          .copied_bytes = 2 * ranks * slots};
}

void HeadGradients::lay_out(Parts& memory) {
  starts_.lay_out(memory);
  memory_.lay_out(memory);
  const std::int64_t rows = exchange_.most_tokens(), keys = most_whole_keys(layer_);
  const kernels::AttendParams& own = exchange_.own_layer().bounds;
  dout_ = memory.take(at(rows * heads() * storage_of(fp32).row_bytes(own.value_dim)));
  terms_ = memory.take_array<kernels::RowTerm>(at(rows * heads()));
  dq_ =
      memory.take(at(GradientSums::bytes(rows * (heads() / kv_heads()), kv_heads(), own.head_dim)));
  dk_ = memory.take(at(GradientSums::bytes(keys, kv_heads(), own.head_dim)));
  dv_ = memory.take(at(GradientSums::bytes(keys, kv_heads(), own.value_dim)));
  key_map_ =
      memory.take_array<std::int64_t>(at(layer_.comm.size() * exchange_.keys().block_rows()));
}

void HeadGradients::backward(Pass& pass, const GradientArgs& args) const {
  const Run& run = pass.run;
  bring(pass, args);
  const kernels::GradientParams p = attend(pass, args);
  return_rows(pass, p.dq);
  find_key_map(pass);
  kernels::GradientParams own;
  memory_.give_key_sums(own, memory_.own_keys(run), nullptr);
  return_keys(pass, p.dk, own.dk, "backward, exchange of dk");
  return_keys(pass, p.dv, own.dv, "backward, exchange of dv");
  memory_.store(run, args, run.attend.tokens);
}

/// Receives all rows and keys of this rank's heads.
void HeadGradients::bring(Pass& pass, const GradientArgs& args) const {
  pass.write_own_digest(layer_.kernels);
  const KeyBlock keys = exchange_.ready_keys(pass);
  exchange_.find_places(pass);
  Pass own(pass.run);
  starts_.find(pass.run);
  starts_.give(pass.run, layer_.comm.rank(), own.attend.batch);
  memory_.begin(own, args);
  exchange_.exchange_queries(pass);
  exchange_.exchange_rows(pass, token_rows_of(args.dout), layer_.bounds.value_dim, args.dout.dtype,
                          dout_, "backward, exchange of dout");
  constexpr int kFloats = HeadExchange::kTermFloats;
  const kernels::TokenRows terms(memory_.terms(), std::int64_t{layer_.bounds.heads} * kFloats,
                                 kFloats);
  exchange_.exchange_rows(pass, terms, kFloats, fp32, reinterpret_cast<std::byte*>(terms_),
                          "backward, exchange of row terms");
  for (const int i : {0, 1}) exchange_.exchange_keys(pass, keys, i);
  exchange_.attend_to(pass, exchange_.share());
}

/// Computes the gradients of this rank's heads, over whole sequences.
kernels::GradientParams HeadGradients::attend(const Pass& pass, const GradientArgs& args) const {
  kernels::GradientParams p = memory_.params(pass, args);
  const std::int64_t keys = [&] {
    std::int64_t count = 0;
    for (int rank = 0; rank < layer_.comm.size(); ++rank)
      count += exchange_.keys().rows_of(pass.run, rank);
    return std::min(count, most_whole_keys(layer_));
  }();
  p.dout = {dout_, std::int64_t{p.heads} * p.value_dim, p.value_dim};
  p.terms = terms_;
  p.dq = {floats(dq_), p.tokens * (p.heads / p.kv_heads), p.head_dim};
  p.dk = {floats(dk_), keys, p.head_dim};
  p.dv = {floats(dv_), keys, p.value_dim};
  layer_.kernels.attend_gradients(p, pass.run.stream);
  return p;
}

/// Sends the dq of each row to its rank, [rows, heads of the sender, head_dim].
void HeadGradients::return_rows(const Pass& pass, const GradientSums& sums) const {
  const Run& run = pass.run;
  const int dim = layer_.bounds.head_dim, group = heads() / kv_heads();
  const std::int64_t most = exchange_.rows().capacity(run);
  const std::int64_t slot = exchange_.row_slot(most, dim, fp32);
  const auto dense = [&](std::byte* data, int of_heads, int first) {
    return kernels::TokenRows(floats(data) + std::int64_t{first} * dim,
                              std::int64_t{of_heads} * dim, dim);
  };
  PackOutputsParams pack;
  pack.dim = dim;
  pack.dtype = fp32;
  pack.tokens = layer_.comm.size() * most;
  pack.heads = group;
  pack.map = exchange_.rows().map();
  pack.map_of = PackOutputsParams::MapOf::sources;
  for (int j = 0; j < kv_heads(); ++j) {
    pack.from = rows_of_group(sums, j, group, 0);
    pack.to = dense(exchange_.leaving(), heads(), j * group);
    pack.to.gap = {slot / 4 - most * heads() * dim, static_cast<std::uint32_t>(most)};
    layer_.kernels.pack_outputs(pack, run.stream);
  }
  exchange_.all_to_all(pass, slot, "backward, exchange of dq");

  const int whole_group = layer_.bounds.heads / layer_.bounds.kv_heads;
  pack.tokens = run.attend.tokens;
  pack.map = nullptr;
  for (int p = 0; p < layer_.comm.size(); ++p) {
    const HeadShare share = exchange_.share_of(p);
    pack.heads = share.query.size() / share.kv.size();
    for (int j = 0; j < share.kv.size(); ++j) {
      const int kv_head = share.kv.begin + j, head = share.query.begin + j * pack.heads;
      pack.from = dense(exchange_.arriving() + p * slot, share.query.size(), j * pack.heads);
      pack.to = rows_of_group(memory_.own_rows(run.attend.tokens), kv_head, whole_group,
                              head - kv_head * whole_group);
      layer_.kernels.pack_outputs(pack, run.stream);
    }
  }
}

/// Computes which of the whole sequences' keys each rank has.
void HeadGradients::find_key_map(const Pass& pass) const {
  const Run& run = pass.run;
  kernels::MapParams map;
  map.shard = run.arrays.keys;
  map.batch = pass.attend.batch;  // with the starts of whole sequences
  map.ranks = layer_.comm.size();
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
  pack.tokens = layer_.comm.size() * most;
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
  for (int p = 0; p < layer_.comm.size(); ++p) {
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
