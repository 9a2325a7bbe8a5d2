// The strategy heads: ranks share the work by heads, as DeepSpeed-Ulysses does.
//
//     my rows of q, k, v, all heads  ->  all rows, my heads  ->  one attention  ->  my rows, all
//     heads
//
// Three all-to-alls bring queries, keys and values, and one takes finished rows back; no state
// travels, and no two are merged, so the bits are those of one rank alone. Replicated queries need
// not travel: then results by heads are there at once, and whole ones are gathered.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "longspan/error.hpp"
#include "src/strategy/shared/dealt_rows.hpp"
#include "src/strategy/shared/finished_rows.hpp"
#include "src/strategy/shared/head_shares.hpp"
#include "src/strategy/shared/travelling_keys.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {
namespace {

using kernels::PackOutputsParams;

/// The layer as the attention of one rank sees it: its heads, all keys.
Layer of_own_heads(const Layer& layer, const DealtRows& rows) {
  Layer own = layer;
  const HeadShare share =
      head_share(layer.bounds.heads, layer.bounds.kv_heads, layer.comm.rank(), layer.comm.size());
  own.bounds.tokens = rows.most_tokens();
  own.bounds.heads = share.query.size();
  own.bounds.kv_heads = share.kv.size();
  own.bounds.shard.rank = 0;
  own.bounds.shard.ranks = 1;
  return own;
}

class Heads final : public Strategy {
 public:
  explicit Heads(const Layer& layer)
      : layer_(layer),
        rows_(layer),
        own_layer_(of_own_heads(layer, rows_)),
        keys_(layer),
        own_keys_(own_layer_),
        most_(most_heads(layer.bounds.heads, layer.bounds.kv_heads, layer.comm.size())) {
    scratch_bytes_ = layer_.kernels.attend_scratch(own_layer_.bounds);
  }

  void lay_out(Parts& memory) override {
    const kernels::AttendParams& own = own_layer_.bounds;
    state_ = memory.take(at(kernels::StateSlots::bytes(own.tokens * own.heads, own.value_dim)));
    scratch_ = memory.take(scratch_bytes_);
    if (ranks() == 1) return;
    keys_.lay_out(memory);
    rows_.lay_out_map(memory);
    const std::int64_t slot = std::max(
        {rows_.are_gathered() ? query_slot(rows_.most_capacity()) : 0,
         key_slot(keys_.block_rows(), 0), key_slot(keys_.block_rows(), 1), most_finished_bytes()});
    leaving_ = memory.take(at(ranks() * slot));
    arriving_ = memory.take(at(ranks() * slot));
    if (rows_.are_gathered())
      queries_ = memory.take(at(own.tokens * own.heads * own.head_dim * query_bytes()));
    if (rows_.are_dealt()) finished_ = memory.take(at(finished(own.tokens, rank()).bytes()));
    copied_ = keys_.take_block(memory, keys_.block_rows());
    starts_ = memory.take_array<std::int64_t>(at(std::int64_t{ranks()} * own.batch.size));
    ordered_ = own_keys_.take_block(memory, own.max_kv_len * own.batch.size);
  }

  ExchangeInfo exchange() const override { return {Exchange::gather}; }

  void prepare(Run& run) const override {
    check(run);
    if (ranks() > 1) {
      run.keys_travel = true;
      rows_.prepare(run);
    } else if (rows_.are_dealt()) {  // all of them
      run.merge.batch = {run.arrays.batch, run.arrays.query_start, run.arrays.kv_len};
    }
    run.attend.scratch = scratch_;
    run.attend.scratch_bytes = scratch_bytes_;
    run.attend.state = {state_, run.attend.tokens * own_layer_.bounds.heads,
                        layer_.bounds.value_dim, 1};
    run.attend.slot = 0;
    run.merge.states = run.attend.state;
  }

  void queue(Run& run) const override {
    run.enter(Phase::attend);
    if (ranks() == 1) return run.attend_to(run.merge, Phase::merge, layer_.kernels);
    layer_.kernels.say(run.say, run.stream);
    keys_.begin(run, "exchange of keys, counts");
    run.enter(Phase::exchange);
    rows_.make_map(run);
    if (rows_.are_gathered()) exchange_queries(run);
    exchange_keys(run);
    const kernels::MergeParams asked = run.merge;
    take_own_heads(run);

    run.enter(Phase::attend);
    if (!by_heads()) point_at_finished(run);
    run.attend_to(run.merge, Phase::exchange, layer_.kernels);
    if (by_heads()) return;
    if (rows_.are_dealt())
      return_rows(run, asked);
    else
      gather_heads(run, asked);
  }

 private:
  static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
  int rank() const { return layer_.comm.rank(); }
  int ranks() const { return layer_.comm.size(); }
  HeadShare share(int rank) const {
    return head_share(layer_.bounds.heads, layer_.bounds.kv_heads, rank, ranks());
  }
  bool by_heads() const { return layer_.options.results.part == ResultPart::heads; }
  int dim_of(int i) const { return i == 0 ? layer_.bounds.head_dim : layer_.bounds.value_dim; }
  std::int64_t query_bytes() const {
    return static_cast<std::int64_t>(size_of(layer_.bounds.q_dtype));
  }
  std::int64_t key_bytes() const {
    return static_cast<std::int64_t>(size_of(layer_.bounds.kv_dtype));
  }

  // Bytes from one rank to one rank: equal ones, for the most heads.
  std::int64_t query_slot(std::int64_t rows) const {
    return aligned(rows * most_.query * layer_.bounds.head_dim * query_bytes());
  }
  std::int64_t key_slot(std::int64_t rows, int i) const {
    return aligned(rows * most_.kv * dim_of(i) * key_bytes());
  }
  static std::int64_t aligned(std::int64_t bytes) { return (bytes + 15) / 16 * 16; }

  /// Finished rows of the heads of one rank; slots are for the most heads.
  FinishedSlot finished(std::int64_t rows, int rank) const {
    return {rows, share(rank).query.size(), layer_.bounds.value_dim,
            layer_.options.dtypes.of_out()};
  }
  std::int64_t finished_slot(std::int64_t rows) const {
    return FinishedSlot{rows, most_.query, layer_.bounds.value_dim, layer_.options.dtypes.of_out()}
        .bytes();
  }
  std::int64_t most_finished_bytes() const {
    if (by_heads()) return 0;
    return finished_slot(rows_.are_dealt() ? rows_.most_capacity() : rows_.most_tokens());
  }

  void check(const Run& run) const {
    const auto refuse = [](const char* what) {
      throw Unsupported(fmt::format("strategy heads does not take {}; gather-states does", what));
    };
    if (ranks() == 1) {
      if (run.arrays.queries.layout == Layout::listed) refuse("listed query rows on one rank");
      return;
    }
    if (run.arrays.keys.layout == Layout::listed) refuse("listed keys");
    if (run.arrays.keys.length > layer_.bounds.max_kv_len)
      throw InputError(fmt::format("total_keys is {}; the layer was made for {} (max_kv_len)",
                                   run.arrays.keys.length, layer_.bounds.max_kv_len));
  }

  /// Rows of some heads: `from` has them from its head `first` on.
  static kernels::TokenRows heads_from(kernels::TokenRows from, int first, DType dtype) {
    from.data = static_cast<std::byte*>(from.data) +
                first * from.head_stride * static_cast<std::int64_t>(size_of(dtype));
    return from;
  }
  static kernels::TokenRows dense(std::byte* data, int heads, int dim) {
    return {data, std::int64_t{heads} * dim, dim};
  }

  /// Sends the rows of `from` to every rank, to each those of its heads (share.*range).
  void pack_heads(const Run& run, const kernels::TokenRows& from, std::int64_t rows, int dim,
                  DType dtype, HeadRange HeadShare::*range, std::int64_t slot) const {
    for (int p = 0; p < ranks(); ++p) {
      const HeadRange heads = share(p).*range;
      PackOutputsParams pack;
      pack.tokens = rows;
      pack.heads = heads.size();
      pack.dim = dim;
      pack.dtype = dtype;
      pack.from = heads_from(from, heads.begin, dtype);
      pack.to = dense(leaving_ + p * slot, heads.size(), dim);
      layer_.rows.pack_outputs(pack, run.stream);
    }
  }

  /// Brings all rows of this rank's heads, in the order of the whole q.
  void exchange_queries(Run& run) const {
    const int dim = layer_.bounds.head_dim, heads = own_layer_.bounds.heads;
    const std::int64_t most = rows_.capacity(run), slot = query_slot(most);
    pack_heads(run, dense(static_cast<std::byte*>(run.args.q.data), layer_.bounds.heads, dim),
               std::min(run.args.q.shape[0], most), dim, layer_.bounds.q_dtype, &HeadShare::query,
               slot);
    layer_.comm.all_to_all(leaving_, arriving_, at(slot), run.stream, "exchange of queries",
                           run.said);
    PackOutputsParams place;
    place.tokens = ranks() * most;
    place.heads = heads;
    place.dim = dim;
    place.dtype = layer_.bounds.q_dtype;
    place.from = dense(arriving_, heads, dim);
    place.from.gap = {slot / query_bytes() - most * heads * dim, static_cast<std::uint32_t>(most)};
    place.to = dense(queries_, heads, dim);
    place.map = rows_.map();
    layer_.rows.pack_outputs(place, run.stream);
  }

  /// Brings all keys and values of this rank's kv heads, in the order of whole sequences.
  void exchange_keys(Run& run) const {
    std::int64_t most = 0;
    for (int p = 0; p < ranks(); ++p) most = std::max(most, keys_.rows_of(run, p));
    KeyBlock own = copied_;
    if (keys_.must_copy(run))
      keys_.copy_to(run, copied_);
    else
      own = keys_.in_place(run);
    const std::int64_t rows = keys_.rows_of(run, rank());
    run.attend.pages = {};
    run.attend.kv_heads = own_layer_.bounds.kv_heads;
    for (int p = 0; p < ranks(); ++p) own_keys_.find_starts(run, p, {.start = starts_of(p)});
    own_keys_.find_whole_starts(run, ordered_);
    for (int i = 0; i < 2; ++i) {
      const std::int64_t slot = key_slot(most, i);
      pack_heads(run, dense(i == 0 ? own.k : own.v, layer_.bounds.kv_heads, dim_of(i)), rows,
                 dim_of(i), layer_.bounds.kv_dtype, &HeadShare::kv, slot);
      layer_.comm.all_to_all(leaving_, arriving_, at(slot), run.stream,
                             i == 0 ? "exchange of keys" : "exchange of values", run.said);
      for (int p = 0; p < ranks(); ++p) {
        KeyBlock from{.start = starts_of(p)}, to = ordered_;
        (i == 0 ? from.k : from.v) = arriving_ + p * slot;
        (i == 0 ? to.v : to.k) = nullptr;
        own_keys_.copy_in_order(run, p, from, to);
      }
    }
    run.attend.k = own_keys_.keys_in(ordered_);
    run.attend.v = own_keys_.values_in(ordered_);
    run.attend.batch.key_start = run.arrays.batch > 1 ? ordered_.start : nullptr;
    run.attend.batch.key_pitch = 0;
    run.attend.shard = {.length = run.arrays.keys.length};
  }
  std::int64_t* starts_of(int rank) const {
    return starts_ + std::int64_t{rank} * layer_.bounds.batch.size;
  }

  /// Makes the attention that of this rank's heads.
  void take_own_heads(Run& run) const {
    const HeadShare own = share(rank());
    const auto scales = [&](Scales all) {
      if (all && all.per_head) all.data += own.kv.begin;
      return all;
    };
    kernels::AttendParams& p = run.attend;
    p.heads = own.query.size();
    p.q = rows_.are_gathered() ? dense(queries_, p.heads, p.head_dim)
                               : heads_from(p.q, own.query.begin, p.q_dtype);
    p.q_scale = scales(p.q_scale);
    p.k_scale = scales(p.k_scale);
    p.v_scale = scales(p.v_scale);
    p.bias.slopes = floats_from(p.bias.slopes, own.query.begin);
    run.merge.heads = p.heads;
    run.merge.state_heads = run.merge.first_head = 0;
    run.merge.sinks = floats_from(run.arrays.sinks, own.query.begin);
    run.merge.tokens = p.tokens;
    run.merge.batch = p.batch;
  }

  /// Lets the attention write its rows where they travel from. What ranks say of the run is
  /// compared ahead of the result, so that the attention may end in finished rows.
  void point_at_finished(Run& run) const {
    const FinishedSlot slot = finished(run.attend.tokens, rank());
    std::byte* const to =
        rows_.are_dealt() ? finished_ : arriving_ + rank() * finished_slot(run.attend.tokens);
    run.merge.headers = {};
    run.merge.out = slot.out(to);
    run.merge.lse = slot.lse(to);
  }

  /// Takes the finished rows to the ranks whose they are, and puts what comes side by side.
  void return_rows(Run& run, const kernels::MergeParams& asked) const {
    const std::int64_t most = rows_.capacity(run), bytes = finished_slot(most);
    PackOutputsParams pack = finished(run.attend.tokens, rank()).take_from(finished_, 1);
    const FinishedSlot leaving = finished(most, rank());
    const auto apart = static_cast<std::uint32_t>(most);
    pack.tokens = ranks() * most;
    pack.map = rows_.map();
    pack.map_of = PackOutputsParams::MapOf::sources;
    pack.to = leaving.out(leaving_);
    pack.to.gap = {
        bytes / static_cast<std::int64_t>(size_of(pack.dtype)) - most * pack.heads * pack.dim,
        apart};
    pack.to_lse = leaving.lse(leaving_);
    pack.to_lse.gap = {bytes / 4 - most * pack.heads, apart};
    pack.headers = asked.headers;
    layer_.rows.pack_outputs(pack, run.stream);
    layer_.comm.all_to_all(leaving_, arriving_, at(bytes), run.stream, "exchange of results");
    for (int p = 0; p < ranks(); ++p) {
      PackOutputsParams place = finished(most, p).take_from(arriving_ + p * bytes, 1);
      place.tokens = std::min(most, asked.tokens);
      place.map = rows_.own_map(run);
      place.map_of = PackOutputsParams::MapOf::presence;
      put(place, p, asked, run.stream);
    }
  }

  /// Brings the finished rows of all ranks' heads here.
  void gather_heads(Run& run, const kernels::MergeParams& asked) const {
    const std::int64_t rows = run.attend.tokens, bytes = finished_slot(rows);
    layer_.comm.all_gather(arriving_ + rank() * bytes, arriving_, at(bytes), run.stream,
                           "gather of results");
    for (int p = 0; p < ranks(); ++p) {
      PackOutputsParams place = finished(rows, p).take_from(arriving_ + p * bytes, 1);
      place.batch = asked.batch;
      put(place, p, asked, run.stream);
    }
  }

  /// Puts rows of the heads of rank `rank` into the result.
  void put(PackOutputsParams place, int rank, const kernels::MergeParams& asked,
           Stream stream) const {
    const int first = share(rank).query.begin;
    place.to = heads_from(asked.out, first, place.dtype);
    place.to_lse = asked.lse;
    place.headers = asked.headers;
    if (asked.lse.data != nullptr) place.to_lse.data += first * asked.lse.head_stride;
    layer_.rows.pack_outputs(place, stream);
  }

  Layer layer_;
  DealtRows rows_;
  Layer own_layer_;
  TravellingKeys keys_, own_keys_;  // of all kv heads; of this rank's
  MostHeads most_;
  std::size_t scratch_bytes_ = 0;
  std::byte* state_ = nullptr;      // one slot
  std::byte* scratch_ = nullptr;    // AttentionKernels::attend_scratch
  std::byte* leaving_ = nullptr;    // [ranks] slots of rows, or finished rows
  std::byte* arriving_ = nullptr;   // likewise
  std::byte* queries_ = nullptr;    // [tokens, own heads, head_dim], with sharded queries
  std::byte* finished_ = nullptr;   // FinishedSlot of all rows, where rows are dealt out
  KeyBlock copied_;                 // this rank's keys, all kv heads, where they must be copied
  std::int64_t* starts_ = nullptr;  // [ranks, batch] first row of each sequence of each rank's keys
  KeyBlock ordered_;                // whole sequences, own kv heads
};

std::string refusal(const Options& o, int ranks) {
  if (ranks == 1) return "";
  if (o.heads < ranks)
    return fmt::format("it shares the work by heads, and {} heads are fewer than {} ranks", o.heads,
                       ranks);
  if (o.limits.max_kv_len == 0) return "it needs max_kv_len, for its workspace";
  if (o.exchange != Exchange::automatic && o.exchange != Exchange::gather)
    return fmt::format("it sends rows, and does not take exchange {}", name(o.exchange));
  if (o.results.part == ResultPart::heads && !are_result_heads(o.heads, o.kv_heads, ranks))
    return fmt::format(
        "results by heads of {} heads and {} kv heads on {} ranks cut through groups "
        "of heads that read one kv head, or are not the heads that it works on",
        o.heads, o.kv_heads, ranks);
  return "";
}

/// Counts, for the most heads of a rank: slots of one size for what leaves and arrives, rows of all
/// ranks, whole sequences, and this rank's keys, which are copied from pages.
RunCost cost(const Options& o, int ranks, const RunSize& size) {
  const double own_rows = o.queries ? size.most_tokens : most_result_rows(o, ranks, size);
  const double rows = o.queries ? ranks * own_rows : size.tokens;
  if (ranks == 1 || o.heads < ranks) return {.workspace_bytes = state_slot_bytes(o, rows, o.heads)};
  const MostHeads most = most_heads(o.heads, o.kv_heads, ranks);
  const bool by_heads = o.results.part == ResultPart::heads,
             dealt = o.queries || o.results.part == ResultPart::rows;
  const auto aligned = [](double bytes) { return std::ceil(bytes / 16) * 16; };
  const auto finished = [&](double tokens) {
    return static_cast<double>(FinishedSlot{static_cast<std::int64_t>(tokens), most.query,
                                            o.of_values(), o.dtypes.of_out()}
                                   .bytes());
  };
  const double query = static_cast<double>(size_of(o.dtypes.of_query())) * most.query * o.head_dim;
  const double key = static_cast<double>(size_of(o.dtypes.of_kv())) * most.kv;
  const double block = most_keys_of_a_rank(o.keys, size.keys, ranks);
  const double queries = o.queries ? aligned(own_rows * query) : 0;
  const double keys = aligned(block * key * o.head_dim),
               values = aligned(block * key * o.of_values());
  const double results = by_heads ? 0 : finished(dealt ? own_rows : rows);
  return {
      .received_bytes = (ranks - 1) * (queries + keys + values + results),
      .workspace_bytes = state_slot_bytes(o, rows, most.query) +
                         2 * ranks * std::max({queries, keys, values, results}) +
                         (o.queries ? rows * query : 0) +
                         (dealt ? finished(rows) + ranks * own_rows * sizeof(std::int64_t) : 0) +
                         block * key_row_bytes(o) + size.keys * key * (o.head_dim + o.of_values()),
      .messages = 2.0 + (o.queries ? 1 : 0) + (by_heads ? 0 : 1),
      .work = static_cast<double>(most.query) / o.heads,
      .keys_read = static_cast<double>(most.kv) / o.kv_heads,
      .copied_bytes = 2 * ranks * (queries + keys + values + results)};
}

}  // namespace

StrategyEntry heads() {
  return {.info = {"heads", "all rows, or its own rows", "all, its rows, or its heads",
                   "(P-1)/P (T heads + S kv_heads) (head_dim + value_dim) b"},
          .preference = 6,
          .keeps_order = folds_as_one_rank,
          .takes_tables = false,
          .balanced = [](const Options&) { return Balanced::evenly; },
          .refusal = refusal,
          .cost = cost,
          .make = [](const Layer& layer) -> std::unique_ptr<Strategy> {
            return std::make_unique<Heads>(layer);
          }};
}

}  // namespace longspan
