#include "src/strategy/shared/head_exchange.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "longspan/error.hpp"
#include "src/base/at.hpp"

namespace longspan {
namespace {

using kernels::PackOutputsParams;

std::int64_t aligned(std::int64_t bytes) { return (bytes + 15) / 16 * 16; }

/// Rows of some heads: those of `from`, starting at its head `first`.
kernels::TokenRows heads_from(kernels::TokenRows from, int first, DType dtype) {
  from.data = from.address(storage_of(dtype), first * from.head_stride);
  return from;
}

kernels::TokenRows dense(std::byte* data, int heads, int dim) {
  return {data, std::int64_t{heads} * dim, dim};
}

LayerContext of_own_heads(const LayerContext& layer, const HeadShare& share, std::int64_t tokens) {
  LayerContext own = layer;
  own.bounds.tokens = tokens;
  own.bounds.heads = share.query.size();
  own.bounds.kv_heads = share.kv.size();
  return own;
}

}  // namespace

HeadExchange::HeadExchange(const LayerContext& layer, const NodeRanks& ranks, comm::Transport& comm)
    : layer_(layer),
      ranks_(ranks),
      comm_(comm),
      share_(head_share(layer.bounds.heads, layer.bounds.kv_heads, comm.rank(), comm.size())),
      most_(most_heads(layer.bounds.heads, layer.bounds.kv_heads, comm.size())),
      rows_(layer, ranks),
      own_layer_(
          of_own_heads(layer, share_,
                       layer.options.limits.max_tokens * (rows_.are_gathered() ? ranks.count : 1))),
      keys_(layer),
      own_keys_(own_layer_),
      route_(peers()),
      underway_(peers()) {
  make_gather({.ranks = peers(),  // queries, keys, values
               .parts = (rows_.are_gathered() ? 1 : 0) + (keys_.has_values() ? 2 : 1),
               .result_parts = by_heads() ? 0 : 1},
              route_);
}

void HeadExchange::lay_out(Parts& memory) {
  const kernels::AttendParams& own = own_layer_.bounds;
  keys_.lay_out(memory);
  rows_.lay_out_map(memory);
  const std::int64_t slot =
      std::max({rows_.are_gathered() ? query_slot(rows_.most_capacity()) : 0,
                key_slot(keys_.block_rows(), 0), key_slot(keys_.block_rows(), 1),
                most_finished_bytes(), gradient_slot()});
  leaving_ = memory.take(at(peers() * slot));
  // Finished rows have all left leaving_ before any arrive.
  const std::int64_t rows = rows_.are_dealt() ? finished(own.tokens, comm_.rank()).bytes() : 0;
  arriving_ = finished_ = memory.take(at(std::max(peers() * slot, rows)));
  if (ordered_.k == nullptr) lay_out_whole(memory);
  copied_ = keys_.take_block(memory, keys_.block_rows());
  starts_ = memory.take_array<std::int64_t>(at(std::int64_t{peers()} * own.batch.size));
  ordered_.start = memory.take_array<std::int64_t>(at(own.batch.size));
}

void HeadExchange::lay_out_whole(Parts& memory) {
  const kernels::AttendParams& own = own_layer_.bounds;
  if (rows_.are_gathered()) queries_ = memory.take(at(query_slot(own.tokens)));
  const Limits& limits = layer_.options.limits;
  const std::int64_t most = ranks_.nodes == 1
                                ? longspan::most_keys(limits, own.batch.size)
                                : most_keys_of_a_rank(of_nodes(layer_.options.keys, ranks_.count),
                                                      limits, own.batch.size, ranks_.nodes);
  ordered_.k = memory.take(at(key_slot(most, 0)));
  if (keys_.has_values()) ordered_.v = memory.take(at(key_slot(most, 1)));
}

void HeadExchange::prepare(Pass& pass, const char* strategy) const {
  const Run& run = pass.run;
  if (run.arrays.keys.layout == Layout::listed)
    throw Unsupported(
        fmt::format("strategy {} does not take listed keys; gather-states does", strategy));
  if (run.arrays.keys.length > layer_.bounds.max_kv_len)
    throw InputError(fmt::format("total_keys is {}; the layer was made for {} (max_kv_len)",
                                 run.arrays.keys.length, layer_.bounds.max_kv_len));
  pass.keys_travel = true;
  rows_.prepare(pass);
}

KeyBlock HeadExchange::ready_keys(Pass& pass) const {
  keys_.begin(pass);
  return keys_.own_keys(pass.run, copied_);
}

/// Each part has its own exchange.
class HeadExchange::Forward final : public Visitor {
 public:
  Forward(const HeadExchange& exchange, Pass& pass, const std::function<void()>& attend)
      : exchange_(exchange),
        pass_(pass),
        asked_(pass.merge),
        keys_(exchange.ready_keys(pass)),
        attend_(attend) {}

  comm::Transfers start(const Move& move) override {
    const int i = move.part - (exchange_.rows_.are_gathered() ? 1 : 0);  // keys, and then values
    if (move.what == Move::results)
      exchange_.take_back(pass_, asked_);
    else if (i < 0)
      exchange_.exchange_queries(pass_);
    else
      exchange_.exchange_keys(pass_, keys_, i);
    return {};
  }
  void visit(const Step&, const kernels::BetweenTiles&) override {
    exchange_.make_own(pass_);
    attend_();
  }

 private:
  const HeadExchange& exchange_;
  Pass& pass_;
  const kernels::MergeParams asked_;
  const KeyBlock keys_;
  const std::function<void()>& attend_;
};

void HeadExchange::queue(Pass& pass, const std::function<void()>& attend) {
  Forward forward(*this, pass, attend);
  pass.run.enter(Phase::exchange);
  find_places(pass);
  walk(route_, pass, comm_, nullptr, underway_, forward);
}

void HeadExchange::find_places(const Pass& pass) const {
  rows_.make_map(pass);
  find_starts(pass.run);
}

void HeadExchange::take_back(const Pass& pass, const kernels::MergeParams& asked) const {
  if (rows_.are_dealt())
    return_rows(pass, asked);
  else
    gather_heads(pass, asked);
}

/// Points the attention at this rank's heads, once their rows and keys have arrived.
void HeadExchange::make_own(Pass& pass) const {
  attend_to_own(pass);
  if (!by_heads()) point_at_finished(pass);
}

void HeadExchange::attend_to_own(Pass& pass) const {
  attend_to(pass, share_);
  if (ranks_.nodes > 1) take_rows_of_node(pass);
}

std::int64_t HeadExchange::row_slot(std::int64_t rows, int dim, DType dtype) const {
  return aligned(rows * most_.query * storage_of(dtype).row_bytes(dim));
}

std::int64_t HeadExchange::key_sum_slot(std::int64_t rows, int dim) const {
  return kernels::GradientSums::bytes(rows, most_.kv, dim);
}

std::int64_t HeadExchange::query_slot(std::int64_t rows) const {
  return row_slot(rows, layer_.bounds.head_dim, layer_.bounds.q_dtype);
}

/// The most bytes that a backward sends to a rank.
std::int64_t HeadExchange::gradient_slot() const {
  if (!layer_.options.gradients) return 0;
  const int dim = std::max(layer_.bounds.head_dim, layer_.bounds.value_dim);
  const std::int64_t rows = rows_.are_gathered() ? rows_.most_capacity() : most_tokens();
  return std::max(row_slot(rows, std::max(dim, kTermFloats), fp32),
                  key_sum_slot(keys_.block_rows(), dim));
}

std::int64_t HeadExchange::key_slot(std::int64_t rows, int i) const {
  return aligned(rows * most_.kv * key_format().bytes(elements_of(i)));
}

FinishedSlot HeadExchange::finished(std::int64_t rows, int peer) const {
  return {rows, share_of(peer).query.size(), layer_.bounds.value_dim,
          layer_.options.dtypes.of_out()};
}

std::int64_t HeadExchange::finished_slot(std::int64_t rows) const {
  return FinishedSlot{rows, most_.query, layer_.bounds.value_dim, layer_.options.dtypes.of_out()}
      .bytes();
}

std::int64_t HeadExchange::most_finished_bytes() const {
  if (by_heads()) return 0;
  return finished_slot(rows_.are_dealt() ? rows_.most_capacity() : own_layer_.bounds.tokens);
}

/// Packs the rows of `from` for every rank: to each those of its heads (share.*range).
void HeadExchange::pack_heads(const Run& run, const kernels::TokenRows& from, std::int64_t rows,
                              int dim, DType dtype, HeadRange HeadShare::*range,
                              std::int64_t slot) const {
  for (int p = 0; p < peers(); ++p) {
    const HeadRange heads = share_of(p).*range;
    PackOutputsParams pack;
    pack.tokens = rows;
    pack.heads = heads.size();
    pack.dim = dim;
    pack.dtype = dtype;
    pack.from = heads_from(from, heads.begin, dtype);
    pack.to = dense(leaving_ + p * slot, heads.size(), dim);
    layer_.kernels.pack_outputs(pack, run.stream);
  }
}

void HeadExchange::all_to_all(const Pass& pass, std::int64_t slot, const char* step) const {
  comm_.all_to_all(leaving_, arriving_, at(slot), pass.run.stream, step, pass.digests);
}

void HeadExchange::gather(const Pass& pass, std::int64_t slot, const char* step) const {
  comm_.all_gather(arriving_ + peer() * slot, arriving_, at(slot), pass.run.stream, step,
                   pass.digests);
}

void HeadExchange::exchange_queries(const Pass& pass) const {
  const int dim = layer_.bounds.head_dim;
  std::byte* const own = static_cast<std::byte*>(pass.run.args.q.data);
  exchange_rows(pass, dense(own, layer_.bounds.heads, dim), dim, layer_.bounds.q_dtype, queries_,
                "exchange of queries");
}

void HeadExchange::exchange_rows(const Pass& pass, const kernels::TokenRows& from, int dim,
                                 DType dtype, std::byte* to, const char* step) const {
  const Run& run = pass.run;
  const int heads = own_layer_.bounds.heads;
  const std::int64_t most = rows_.capacity(run), slot = row_slot(most, dim, dtype);
  pack_heads(run, from, std::min(run.args.q.shape[0], most), dim, dtype, &HeadShare::query, slot);
  all_to_all(pass, slot, step);
  PackOutputsParams place;
  place.tokens = peers() * most;
  place.heads = heads;
  place.dim = dim;
  place.dtype = dtype;
  place.from = dense(arriving_, heads, dim);
  place.from.gap = {storage_of(dtype).elements(slot) - most * heads * dim,
                    static_cast<std::uint32_t>(most)};
  place.to = dense(to, heads, dim);
  place.map = rows_.map();
  layer_.kernels.pack_outputs(place, run.stream);
}

/// Computes where sequences start in the keys of every rank, and in all of them.
void HeadExchange::find_starts(const Run& run) const {
  for (int p = 0; p < peers(); ++p)
    own_keys_.find_starts(run, ranks_.first + p, {.start = starts_of(p)});
  own_keys_.find_whole_starts(run, ordered_, part_of_node(run.arrays.keys, ranks_));
}

std::int64_t HeadExchange::most_keys(const Run& run) const {
  std::int64_t most = 0;
  for (int p = 0; p < peers(); ++p) most = std::max(most, keys_.rows_of(run, ranks_.first + p));
  return most;
}

void HeadExchange::exchange_keys(const Pass& pass, const KeyBlock& own, int i) const {
  const Run& run = pass.run;
  const std::int64_t rows = keys_.rows_of(run, layer_.comm.rank());
  const std::int64_t slot = key_slot(most_keys(run), i);
  const int columns = elements_of(i);
  pack_heads(run, dense(i == 0 ? own.k : own.v, layer_.bounds.kv_heads, columns), rows, columns,
             layer_.bounds.kv_dtype, &HeadShare::kv, slot);
  all_to_all(pass, slot, i == 0 ? "exchange of keys" : "exchange of values");
  for (int p = 0; p < peers(); ++p) {
    KeyBlock from{.start = starts_of(p)}, to = ordered_;
    (i == 0 ? from.k : from.v) = arriving_ + p * slot;
    (i == 0 ? to.v : to.k) = nullptr;
    own_keys_.copy_in_order(run, ranks_.first + p, from, to, part_of_node(run.arrays.keys, ranks_));
  }
}

void HeadExchange::attend_to(Pass& pass, const HeadShare& some) const {
  const Run& run = pass.run;
  const auto kv_heads_from = [&](kernels::KvRows all) {
    all.data = all.address(key_format(), (some.kv.begin - share_.kv.begin) * all.head_stride);
    return all;
  };
  kernels::AttendParams& p = pass.attend;
  p.heads = some.query.size();
  p.kv_heads = some.kv.size();
  p.q = rows_.are_gathered() ? heads_from(dense(queries_, share_.query.size(), p.head_dim),
                                          some.query.begin - share_.query.begin, p.q_dtype)
                             : heads_from(p.q, some.query.begin, p.q_dtype);
  own_keys_.attend_to(pass, ordered_, part_of_node(run.arrays.keys, ranks_));
  p.k = kv_heads_from(p.k);
  p.v = kv_heads_from(p.v);
  p.q_scale = p.q_scale.from_head(some.kv.begin);
  p.k_scale = p.k_scale.from_head(some.kv.begin);
  p.v_scale = p.v_scale.from_head(some.kv.begin);
  p.bias.slopes = slopes_from(p.bias.slopes, some.query.begin);
  p.dropout.first_head += some.query.begin;
  if (pass.bias_sums.slopes != nullptr) pass.bias_sums.slopes += some.query.begin;
  pass.merge.heads = p.heads;
  pass.merge.state_heads = pass.merge.first_head = 0;
  pass.merge.sinks = floats_from(run.arrays.sinks, some.query.begin);
  pass.merge.tokens = p.tokens;
  pass.merge.batch = p.batch;
}

/// Reduces an attention with all rows to the node's rows, and the result with it.
void HeadExchange::take_rows_of_node(Pass& pass) const {
  if (!rows_.are_dealt()) return;
  const Run& run = pass.run;
  const Shard part = part_of_node(run.arrays.queries, ranks_);
  const std::int64_t rows = rows_.rows_of_node(run);
  pass.merge.tokens = rows;
  pass.merge.batch = {};
  if (!rows_.are_gathered()) return;
  kernels::AttendParams& p = pass.attend;
  p.tokens = rows;
  p.queries = part;
  std::swap(p.batch.query_start, p.batch.whole_query_start);
}

/// Makes the attention write its rows directly into the send buffer. The ranks' reports of the run
/// are compared before the result, so the attention may end in finished rows.
void HeadExchange::point_at_finished(Pass& pass) const {
  const FinishedSlot slot = finished(pass.merge.tokens, comm_.rank());
  std::byte* const to =
      rows_.are_dealt() ? finished_ : arriving_ + comm_.rank() * finished_slot(pass.merge.tokens);
  pass.merge.headers = {};
  pass.merge.out = slot.out(to);
  pass.merge.lse = slot.lse(to);
}

/// Sends the finished rows to their owners, and puts the received ones side by side.
void HeadExchange::return_rows(const Pass& pass, const kernels::MergeParams& asked) const {
  const Run& run = pass.run;
  const std::int64_t most = rows_.capacity(run), bytes = finished_slot(most);
  PackOutputsParams pack = finished(pass.merge.tokens, comm_.rank()).take_from(finished_, 1);
  const FinishedSlot leaving = finished(most, comm_.rank());
  const auto apart = static_cast<std::uint32_t>(most);
  pack.tokens = peers() * most;
  pack.map = rows_.map();
  pack.map_of = PackOutputsParams::MapOf::sources;
  pack.to = leaving.out(leaving_);
  pack.to.gap = {storage_of(pack.dtype).elements(bytes) - most * pack.heads * pack.dim, apart};
  pack.to_lse = leaving.lse(leaving_);
  pack.to_lse.gap = {bytes / 4 - most * pack.heads, apart};
  pack.headers = asked.headers;
  layer_.kernels.pack_outputs(pack, run.stream);
  comm_.all_to_all(leaving_, arriving_, at(bytes), run.stream, "exchange of results");
  for (int p = 0; p < peers(); ++p) {
    PackOutputsParams place = finished(most, p).take_from(arriving_ + p * bytes, 1);
    place.tokens = std::min(most, asked.tokens);
    place.map = rows_.own_map(run);
    place.map_of = PackOutputsParams::MapOf::presence;
    put(place, p, asked, run.stream);
  }
}

/// Gathers the finished rows of all ranks' heads.
void HeadExchange::gather_heads(const Pass& pass, const kernels::MergeParams& asked) const {
  const Run& run = pass.run;
  const std::int64_t rows = pass.merge.tokens, bytes = finished_slot(rows);
  comm_.all_gather(arriving_ + comm_.rank() * bytes, arriving_, at(bytes), run.stream,
                   "gather of results");
  for (int p = 0; p < peers(); ++p) {
    PackOutputsParams place = finished(rows, p).take_from(arriving_ + p * bytes, 1);
    place.batch = asked.batch;
    put(place, p, asked, run.stream);
  }
}

/// Copies rows of the heads of a rank into the result.
void HeadExchange::put(PackOutputsParams place, int peer, const kernels::MergeParams& asked,
                       Stream stream) const {
  const int first = share_of(peer).query.begin;
  place.to = heads_from(asked.out, first, place.dtype);
  place.to_lse = asked.lse;
  place.headers = asked.headers;
  if (asked.lse.data != nullptr) place.to_lse.data += first * asked.lse.head_stride;
  layer_.kernels.pack_outputs(place, stream);
}

std::string refuse_head_exchange(const Options& o, int ranks) {
  if (o.heads < ranks)
    return fmt::format("it shares the work by heads, and {} heads are fewer than {} ranks", o.heads,
                       ranks);
  return refuse_travelling_keys(o, ranks);
}

namespace {

/// The bytes of HeadExchange::gradient_slot.
double gradient_slot_bytes(const Options& o, const MostHeads& most, double rows, double keys) {
  const int dim = std::max(o.head_dim, o.of_values());
  const auto bytes = [](double count, int columns) { return count * 4 * columns; };
  return std::max(bytes(rows * most.query, std::max(dim, HeadExchange::kTermFloats)),
                  bytes(keys * most.kv, kernels::GradientSums::padded(dim)));
}

}  // namespace

/// Counts, for the most heads of a rank: slots of one size for sent and received rows, rows of all
/// ranks, their keys in order, and this rank's keys, which are copied from pages.
RunCost head_exchange_cost(const Options& o, int ranks, const RunSize& size) {
  const double own_rows = o.queries ? size.most_tokens : most_result_rows(o, ranks, size);
  const double rows = o.queries ? ranks * own_rows : size.tokens;
  const MostHeads most = most_heads(o.heads, o.kv_heads, ranks);
  const bool by_heads = o.results.part == ResultPart::heads,
             dealt = o.queries || o.results.part == ResultPart::rows;
  const auto aligned = [](double bytes) { return std::ceil(bytes / 16) * 16; };
  const auto finished = [&](double tokens) {
    return static_cast<double>(FinishedSlot{static_cast<std::int64_t>(tokens), most.query,
                                            o.of_values(), o.dtypes.of_out()}
                                   .bytes());
  };
  const StorageFormat format = storage_of(o.dtypes.of_kv());
  const double query = 1.0 * most.query * storage_of(o.dtypes.of_query()).row_bytes(o.head_dim);
  const double key = 1.0 * most.kv * format.row_bytes(o.head_dim);
  const double value = 1.0 * most.kv * static_cast<double>(travelling_value_bytes(o));
  const double block = most_keys_of_a_rank(o.keys, size.keys, ranks);
  const double queries = o.queries ? aligned(own_rows * query) : 0;
  const double keys = aligned(block * key), values = aligned(block * value);
  const double results = by_heads ? 0 : finished(dealt ? own_rows : rows);
  const double gradients =
      o.gradients ? gradient_slot_bytes(o, most, o.queries ? own_rows : rows, block) : 0;
  const double leaving = ranks * std::max({queries, keys, values, results, gradients});
  return {.received_bytes = (ranks - 1) * (queries + keys + values + results),
          .workspace_bytes = leaving + std::max(leaving, dealt ? finished(rows) : 0) +
                             (o.queries ? rows * query : 0) +
                             (dealt ? ranks * own_rows * sizeof(std::int64_t) : 0) +
                             block * key_row_bytes(o) + size.keys * (key + value),
          .messages = (o.values_in_keys ? 1.0 : 2.0) + (o.queries ? 1 : 0) + (by_heads ? 0 : 1),
          .work = static_cast<double>(most.query) / o.heads,
          .keys_read = static_cast<double>(most.kv) / o.kv_heads,
          .copied_bytes = 2 * ranks * (queries + keys + values + results)};
}

}  // namespace longspan
