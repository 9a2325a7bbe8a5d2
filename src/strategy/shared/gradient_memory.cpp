#include "src/strategy/shared/gradient_memory.hpp"

#include <algorithm>
#include <utility>

#include "src/arguments/tensor_checks.hpp"
#include "src/base/at.hpp"
#include "src/strategy/shared/rank_fold.hpp"

namespace longspan {
namespace {

using kernels::GradientSums;

/// Of the gradients of all sinks, in whole vectors.
std::int64_t sink_bytes(const LayerContext& layer) {
  return GradientSums::bytes(1, 1, layer.bounds.heads);
}

kernels::GradientParams bounds_of(const kernels::AttendParams& largest) {
  kernels::GradientParams bounds;
  static_cast<kernels::AttendParams&>(bounds) = largest;
  return bounds;
}

}  // namespace

GradientMemory::GradientMemory(const LayerContext& layer, const TravellingKeys& keys,
                               const kernels::AttendParams* largest)
    : layer_(layer),
      keys_(keys),
      scratch_bytes_(largest == nullptr ? 0 : layer.kernels.gradient_scratch(bounds_of(*largest))) {
}

double GradientMemory::row_sum_bytes(const Options& options, double rows) {
  return rows * options.heads * GradientSums::element_bytes(options.dtypes.compute) *
         GradientSums::padded(options.head_dim);
}

double GradientMemory::key_sum_bytes(const Options& options, double keys) {
  return keys * options.kv_heads * GradientSums::element_bytes(options.dtypes.compute) *
         (GradientSums::padded(options.head_dim) + GradientSums::padded(options.of_values()));
}

double GradientMemory::workspace_bytes(const Options& options, int ranks, const RunSize& size) {
  if (!options.gradients) return 0;
  const double rows = options.queries ? size.most_tokens : size.tokens;
  // and of each row the gradient of its slope, in the scratch of kernels
  const auto term = static_cast<double>(kernels::row_term_bytes(options.dtypes.compute, 1));
  const double terms = rows * options.heads * (term + sizeof(double));
  return terms + row_sum_bytes(options, rows) +
         key_sum_bytes(options, most_keys_of_a_rank(options.keys, size.keys, ranks));
}

std::int64_t GradientMemory::row_sum_bytes(std::int64_t rows) const {
  const kernels::AttendParams& p = layer_.bounds;
  return GradientSums::bytes(rows * group(), p.kv_heads, p.head_dim, p.dtype);
}

std::int64_t GradientMemory::k_bytes(std::int64_t rows) const {
  const kernels::AttendParams& p = layer_.bounds;
  return GradientSums::bytes(rows, p.kv_heads, p.head_dim, p.dtype);
}

std::int64_t GradientMemory::key_sum_bytes(std::int64_t rows) const {
  const kernels::AttendParams& p = layer_.bounds;
  return k_bytes(rows) + GradientSums::bytes(rows, p.kv_heads, p.value_dim, p.dtype);
}

void GradientMemory::lay_out(Parts& memory, std::int64_t dq_bytes) {
  const kernels::AttendParams& bounds = layer_.bounds;
  terms_ = reinterpret_cast<kernels::RowTerm*>(
      memory.take(at(kernels::row_term_bytes(bounds.dtype, bounds.tokens * bounds.heads))));
  dq_ = memory.take(at(std::max(dq_bytes, row_sum_bytes(bounds.tokens))));
  own_keys_ = memory.take(at(key_sum_bytes(keys_.block_rows())));
  key_starts_ = memory.take_array<std::int64_t>(at(bounds.batch.size));
  sinks_ = memory.take(at(layer_.comm.size() * sink_bytes(layer_)));
  scratch_ = memory.take(scratch_bytes_);
}

void GradientMemory::begin(const Pass& pass, const GradientArgs& args) const {
  const Run& run = pass.run;
  keys_.find_starts(run, layer_.comm.rank(), {.start = key_starts_});
  if (pass.terms != nullptr) return;
  kernels::RowTermParams p;
  p.out_dtype = args.run.out.dtype;
  p.dout_dtype = args.dout.dtype;
  p.tokens = pass.attend.tokens;
  p.heads = layer_.bounds.heads;
  p.value_dim = layer_.bounds.value_dim;
  p.out = token_rows_of(args.run.out);
  p.dout = token_rows_of(args.dout);
  if (args.run.lse) p.lse = token_lse_of(args.run.lse);
  if (args.dlse) p.dlse = token_lse_of(args.dlse);
  p.terms = terms_;
  layer_.kernels.row_terms(p, run.stream);
  if (args.dsinks)
    layer_.kernels.sink_gradients({.batch = pass.attend.batch,
                                   .queries = pass.attend.queries,
                                   .tokens = p.tokens,
                                   .heads = p.heads,
                                   .invariant = pass.attend.invariant,
                                   .sinks = run.arrays.sinks,
                                   .terms = terms_,
                                   .to = sink_part(layer_.comm.rank())},
                                  run.stream);
}

kernels::GradientParams GradientMemory::params(const Pass& pass, const GradientArgs& args) const {
  kernels::GradientParams p;
  static_cast<kernels::AttendParams&>(p) = pass.attend;
  p.scratch = scratch_;
  p.scratch_bytes = scratch_bytes_;
  p.dout = token_rows_of(args.dout);
  p.dout_dtype = args.dout.dtype;
  p.terms = terms(pass);
  p.dq = own_rows(p.tokens);
  p.biases = pass.bias_sums;
  return p;
}

void GradientMemory::give_key_sums(kernels::GradientParams& p, const KeySums& sums,
                                   const std::int64_t* start) const {
  p.dk = {reinterpret_cast<float*>(sums.data), sums.rows, layer_.bounds.head_dim};
  p.dv = {reinterpret_cast<float*>(sums.data + k_bytes(sums.rows)), sums.rows,
          layer_.bounds.value_dim};
  p.key_sum_start = p.batch.size > 1 ? start : nullptr;
}

bool GradientMemory::store_by_kernels(kernels::GradientParams& p, const Pass& pass,
                                      const GradientArgs& args) const {
  const bool last = layer_.comm.size() == 1 && pass.to == nullptr && !args.accumulate &&
                    !pass.run.attend.rope && pass.merge.headers.digests == nullptr;
  const auto fits = [&](const Tensor& to) {
    return to.data != nullptr && to.dtype == layer_.bounds.dtype;
  };
  const auto has_room = [&](const Tensor& to) {  // for all keys that there may be
    return to.dims == 4 || p.dk.rows <= to.shape[0];
  };
  if (!last || !fits(args.dq) || !fits(args.dk) || !fits(args.dv) || !has_room(args.dk) ||
      !has_room(args.dv))
    return false;
  const std::int64_t capacity = args.dk.dims == 4 ? args.dk.shape[1] : 0;
  if (capacity != (args.dv.dims == 4 ? args.dv.shape[1] : 0)) return false;
  p.stores = {token_rows_of(args.dq), key_rows(args.dk), key_rows(args.dv), capacity};
  if (layer_.kernels.stores_gradients(p)) return true;
  p.stores = {};
  return false;
}

kernels::TokenRows GradientMemory::key_rows(const Tensor& to) {
  const int rows = to.dims - 3;  // their dimension
  kernels::TokenRows all{to.data, to.stride[rows], to.stride[rows + 1]};
  if (rows > 0)
    all.gap = {to.stride[0] - to.shape[1] * to.stride[1], static_cast<std::uint32_t>(to.shape[1])};
  return all;
}

GradientMemory::KeySums GradientMemory::own_keys(const Run& run) const {
  return {own_keys_, keys_.rows_of(run, layer_.comm.rank())};
}

kernels::GradientSums GradientMemory::row_sums(std::byte* memory, std::int64_t rows) const {
  return {reinterpret_cast<float*>(memory), rows * group(), layer_.bounds.head_dim};
}

void GradientMemory::add(void* to, const void* from, std::int64_t bytes, Stream stream) const {
  if (layer_.bounds.dtype == DType::fp64)
    return layer_.kernels.add_sums(static_cast<double*>(to), static_cast<const double*>(from),
                                   bytes / 8, stream);
  layer_.kernels.add_sums(static_cast<float*>(to), static_cast<const float*>(from), bytes / 4,
                          stream);
}

float* GradientMemory::sink_part(int rank) const {
  return reinterpret_cast<float*>(sinks_ + rank * sink_bytes(layer_));
}

float* GradientMemory::add_up_sinks(Stream stream) const {
  const std::int64_t bytes = sink_bytes(layer_);
  layer_.comm.all_gather(sink_part(layer_.comm.rank()), sinks_, at(bytes), stream,
                         "backward, gather of dsinks");
  return reinterpret_cast<float*>(RankFold(layer_.comm.size(), *layer_.options.queries)(
      [&](int rank) { return sinks_ + rank * bytes; }, layer_.kernels, bytes, stream));
}

void GradientMemory::finish(const Pass& pass, const GradientArgs& args, std::int64_t rows,
                            bool stored) const {
  if (pass.to == nullptr) {
    if (!stored) {
      store_rows(pass, args, rows);
      store_keys(pass, args);
    }
    if (args.dsinks) store_sinks(pass, args);
    return;
  }
  kernels::GradientParams own;
  give_key_sums(own, own_keys(pass.run), nullptr);
  *pass.to = {own_rows(rows), own.dk, own.dv};
}

kernels::StoreGradientParams GradientMemory::storing(const Pass& pass,
                                                     const GradientArgs& args) const {
  kernels::StoreGradientParams store;
  store.kv_heads = layer_.bounds.kv_heads;
  store.accumulate = args.accumulate;
  store.headers = pass.merge.headers;
  return store;
}

/// The sums may have more rows than q, or fewer: then those of q are past the last sequence.
void GradientMemory::store_rows(const Pass& pass, const GradientArgs& args,
                                std::int64_t rows) const {
  const Run& run = pass.run;
  const std::int64_t own = std::min(rows, run.attend.tokens);
  if (run.attend.rope) {
    kernels::TurnBackParams back{run.rotation(), own_rows(rows)};
    back.rows.geometry.tokens = own;
    layer_.kernels.turn_back_sums(back, run.stream);
  }
  kernels::StoreGradientParams store = storing(pass, args);
  store.sums = own_rows(rows);
  store.count = own * group();
  store.dtype = args.dq.dtype;
  store.group = group();
  store.to = token_rows_of(args.dq);
  store.batch = pass.attend.batch;
  layer_.kernels.store_gradients(store, run.stream);
}

/// Only the device may know how many keys each sequence has.
void GradientMemory::store_keys(const Pass& pass, const GradientArgs& args) const {
  const Run& run = pass.run;
  kernels::GradientParams own;
  give_key_sums(own, own_keys(run), nullptr);
  if (!args.dv && own.dv.rows > 0)  // values are the first columns of the keys
    layer_.kernels.add_to_first_columns(
        {own.dk, own.dv, layer_.bounds.kv_heads, layer_.bounds.dtype}, run.stream);
  const kernels::SummedKeys keys{run.attend.batch, run.arrays.keys,
                                 run.arrays.batch > 1 ? key_starts_ : nullptr};
  if (args.dk_before_rope)
    layer_.kernels.turn_back_keys({run.attend.rope, keys, layer_.bounds.kv_heads, own.dk},
                                  run.stream);
  for (const auto& [sums, to] : {std::pair{own.dk, &args.dk}, {own.dv, &args.dv}}) {
    if (!*to) continue;
    kernels::StoreGradientParams store = storing(pass, args);
    const bool apart = to->dims == 4;  // [batch, capacity, kv_heads, dim]
    store.sums = sums;
    store.count = apart ? sums.rows : std::min(sums.rows, to->shape[0]);
    store.dtype = to->dtype;
    store.to = key_rows(*to);
    store.of_keys = true;
    store.keys = keys;
    if (apart) store.capacity = to->shape[1];
    layer_.kernels.store_gradients(store, run.stream);
  }
}

/// Parts of the gradients of sinks are gathered from all ranks if rows are sharded.
void GradientMemory::store_sinks(const Pass& pass, const GradientArgs& args) const {
  const Stream stream = pass.run.stream;
  const bool sharded = layer_.options.queries && layer_.comm.size() > 1;
  float* const sums = sharded ? add_up_sinks(stream) : sink_part(layer_.comm.rank());
  kernels::StoreGradientParams store = storing(pass, args);
  store.sums = {sums, 1, layer_.bounds.heads};
  store.count = store.kv_heads = 1;
  store.dtype = args.dsinks.dtype;
  store.to = kernels::Rows{args.dsinks.data};
  layer_.kernels.store_gradients(store, stream);
}

}  // namespace longspan
