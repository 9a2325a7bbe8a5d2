#include "src/strategy/shared/head_puts.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "src/base/at.hpp"
#include "src/strategy/shared/dense_rows.hpp"
#include "src/strategy/shared/sent_rows.hpp"

namespace longspan {
namespace {

using kernels::KeyArrivals;
using kernels::RowPlaces;
using kernels::RowPuts;

std::int64_t row_bytes(DType dtype, int dim) { return storage_of(dtype).row_bytes(dim); }

/// Pieces of all heads of a rank's rows, which have `bytes` bytes.
HeadPieces pieces_of_heads(int heads, int kv_heads, int ranks, double bytes) {
  return {most_heads(heads, kv_heads, ranks).query, heads / kv_heads, pieces_of_bytes(bytes),
          false};
}

/// A rank's rows of one tensor, and the location of some of its heads in whole sequences.
struct Travelling {
  DenseRows own;
  std::byte* whole;
  HeadRange HeadShare::*range;

  /// The copy of rows to the rank that has the heads of a share.
  StridedCopy copy(const Stretch& rows, const HeadShare& share) const {
    const HeadRange heads = share.*range;
    return block(own, rows.first, heads.begin, {whole, heads.size(), own.head_bytes}, rows.position,
                 0, rows.count, heads.size());
  }
  std::int64_t row_bytes(const HeadShare& share) const {
    return (share.*range).size() * own.head_bytes;
  }
};

/// Queries, keys and values.
struct Operands {
  Travelling q, k, v;
};

Operands operands_of(const LayerContext& layer, const HeadExchange& exchange, const Run& run,
                     const KeyBlock& own) {
  const kernels::AttendParams& all = layer.bounds;
  const KeyBlock& whole = exchange.whole_keys();
  const Travelling keys{
      {own.k, all.kv_heads, row_bytes(all.kv_dtype, all.head_dim)}, whole.k, &HeadShare::kv};
  return {
      {{static_cast<std::byte*>(run.args.q.data), all.heads, row_bytes(all.q_dtype, all.head_dim)},
       exchange.whole_queries(),
       &HeadShare::query},
      keys,
      layer.options.values_in_keys
          ? keys
          : Travelling{{own.v, all.kv_heads, row_bytes(all.kv_dtype, all.value_dim)},
                       whole.v,
                       &HeadShare::kv}};
}

}  // namespace

/// The rows and keys of each rank, the location of this rank's own, and the number of pieces in
/// which they travel.
struct HeadPuts::Way {
  StretchesOfRanks rows, keys;
  std::int64_t tokens, length;  // of the sequence: rows, and keys
  HeadPieces heads;
  Operands own = {};

  std::int64_t rows_of(int rank) const { return count_rows(rows[at(rank)]); }
};

HeadPuts::HeadPuts(const LayerContext& layer, HeadExchange& exchange)
    : layer_(layer),
      exchange_(exchange),
      puts_(layer, "exchange of rows and keys by heads"),
      route_(ranks()),
      underway_(ranks()) {
  const Options& options = layer_.options;
  if (options.exchange == Exchange::gather) return;
  if (!options.queries) {
    require_exchange(options, false,
                     "strategy heads puts rows of sharded queries there, and no others");
    return;
  }
  const std::int64_t rows = options.limits.max_tokens * options.heads;
  puts_.open([&](Parts& memory) {
    exchange_.lay_out_whole(memory);
    rows_ = memory.take(at(rows * row_bytes(options.dtypes.of_out(), layer_.bounds.value_dim)));
    lse_ = memory.take(at(rows * std::int64_t{sizeof(float)}));
  });
}

std::optional<HeadPuts::Way> HeadPuts::way_of(const Run& run) const {
  const RunArrays& arrays = run.arrays;
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (!is_open() || !is_one_known_sequence(arrays) || arrays.queries.length > kMost ||
      arrays.keys.length > kMost)
    return std::nullopt;
  const kernels::AttendParams& all = layer_.bounds;
  const std::int64_t of_row = all.heads * row_bytes(all.q_dtype, all.head_dim);
  const std::int64_t of_key = all.kv_heads * (row_bytes(all.kv_dtype, all.head_dim) +
                                              travelling_value_bytes(layer_.options));
  auto rows = stretches_of_ranks(arrays.queries, ranks(), arrays.queries.length);
  auto keys = stretches_of_ranks(arrays.keys, ranks(), arrays.keys.length);
  // Such a rank refuses rows that it has no memory for, so they must not be put either.
  if (!rows || !keys || most_rows(*rows) > layer_.options.limits.max_tokens) return std::nullopt;
  const std::int64_t sent = most_rows(*rows) * of_row + most_rows(*keys) * of_key;
  return Way{*std::move(rows), *std::move(keys), arrays.queries.length, arrays.keys.length,
             pieces_of_heads(all.heads, all.kv_heads, ranks(), static_cast<double>(sent))};
}

/// A kernel puts rows and keys, and the attention waits for them on the GPU. It stores finished
/// rows in their final place if it can; otherwise they travel home when all are finished.
class HeadPuts::Forward final : public Visitor {
 public:
  Forward(const HeadPuts& heads, const Pass& pass, const Way& way, RowPuts& puts,
          KeyArrivals& arrivals, const kernels::MergeParams& asked)
      : heads_(heads), pass_(pass), way_(way), puts_(puts), arrivals_(arrivals), asked_(asked) {}

  comm::Transfers start(const Move& move) override {
    if (move.what == Move::blocks)
      heads_.puts_.put(pass_, puts_, arrivals_);
    else if (!puts_.beside)
      send_results();
    return {};
  }
  void visit(const Step&, const kernels::BetweenTiles&) override {
    heads_.puts_.attend(pass_, puts_, Phase::exchange);
  }
  void finish() override {
    pass_.run.enter(Phase::merge);
    heads_.put_result(pass_.run, way_, asked_, puts_.among);
  }

 private:
  void send_results() {  // a separate exchange, which no rank begins after an abort
    puts_.among = heads_.puts_.begin(pass_.run, "exchange of results by heads");
    heads_.take_back(pass_.run, way_);
  }

  const HeadPuts& heads_;
  const Pass& pass_;
  const Way& way_;
  RowPuts& puts_;
  KeyArrivals& arrivals_;
  const kernels::MergeParams& asked_;
};

bool HeadPuts::queue(Pass& pass) {
  const Run& run = pass.run;
  std::optional<Way> found = way_of(run);
  if (!found) return false;
  puts_.compare(pass);
  found->own = operands_of(layer_, exchange_, run, exchange_.ready_keys(pass));
  const Way& way = *found;
  const kernels::MergeParams asked = pass.merge;
  exchange_.attend_to(pass, exchange_.share());
  KeyArrivals arrivals = arrivals_of(way);
  const RowPlaces places = places_of(way);
  end_in_place(pass);
  pass.attend.arrivals = &arrivals;
  pass.merge.places = &places;
  const bool begins = layer_.kernels.takes_arrivals(pass.attend, pass.merge);
  if (!begins) {
    pass.attend.arrivals = nullptr;
    pass.merge.places = nullptr;
    end_where_rows_leave(pass, way);
  }
  RowPuts puts = puts_of(way, begins);
  make_gather({.ranks = ranks(), .parts = 1, .result_parts = 1, .beside = begins}, route_);
  Forward forward(*this, pass, way, puts, arrivals, asked);
  walk(route_, pass, layer_.comm, nullptr, underway_, forward);
  puts_.end(run, received(way) + received_results(way));
  return true;
}

/// The arrivals that the attention waits for, without the counters. Own keys are read in place.
KeyArrivals HeadPuts::arrivals_of(const Way& way) const {
  KeyArrivals arrivals;
  arrivals.behind_puts = true;
  arrivals.rank = rank();
  arrivals.ranks = ranks();
  arrivals.heads_a_piece = way.heads.size;
  const auto own_heads = [&](const DenseRows& rows, int dim) {
    return kernels::KvRows(rows.at(0, exchange_.share().kv.begin), layer_.bounds.kv_dtype,
                           rows.heads, dim);
  };
  arrivals.k = own_heads(way.own.k.own, layer_.bounds.head_dim);
  arrivals.v = has_values() ? own_heads(way.own.v.own, layer_.bounds.value_dim) : arrivals.k;
  arrivals.portions = list_portions(way.keys, rank(), arrivals.portion);
  arrivals.query_portions = list_portions(way.rows, rank(), arrivals.query_portion);
  return arrivals;
}

/// The destinations of finished rows of this rank's heads: at their owners, [rows, heads,
/// value_dim].
RowPlaces HeadPuts::places_of(const Way& way) const {
  static_assert(PeerView::kMostRanks * kMostStretches <= RowPlaces::kMostStretches);
  const int heads = layer_.bounds.heads, first_head = exchange_.share().query.begin;
  const DenseRows place{rows_, heads,
                        row_bytes(layer_.options.dtypes.of_out(), layer_.bounds.value_dim)};
  RowPlaces places;
  for (int p = 0; p < ranks(); ++p) {
    auto* const lse = reinterpret_cast<float*>(layer_.comm.place_at(lse_, p));
    for (const Stretch& one : way.rows[at(p)])
      places.stretch[places.stretches++] = {
          static_cast<int>(one.position), layer_.comm.place_at(place.at(one.first, first_head), p),
          lse + first_head * way.rows_of(p) + one.first, way.rows_of(p)};
  }
  std::sort(places.stretch, places.stretch + places.stretches,
            [](const auto& a, const auto& b) { return a.begin < b.begin; });
  return places;
}

/// The attention stores its rows to places_of, and compares the ranks' reports of the run, as
/// put_result does.
void HeadPuts::end_in_place(Pass& pass) const {
  const std::int64_t dim = layer_.bounds.value_dim;
  pass.merge.out = {rows_, layer_.bounds.heads * dim, dim};
  pass.merge.lse = {reinterpret_cast<float*>(lse_), 1, 0};
}

/// The attention stores its rows in the send buffer, [tokens, own heads, value_dim], and their lse
/// [own heads, tokens], which are sent when all are finished.
void HeadPuts::end_where_rows_leave(Pass& pass, const Way& way) const {
  const FinishedSlot slot = exchange_.finished(way.tokens, rank());
  std::byte* const rows = exchange_.finished_rows();
  pass.merge.headers = {};
  pass.merge.out = slot.out(rows);
  pass.merge.lse = {reinterpret_cast<float*>(rows + slot.lse_at()), 1, way.tokens};
}

/// The puts of this rank: to every rank the rows and keys of its heads. For its own keys, if its
/// attention reads them in place (`begins`), it puts only the ends of their stretches.
RowPuts HeadPuts::puts_of(const Way& way, bool begins) const {
  RowPuts puts;
  puts.pieces = way.heads.count;
  puts.beside = begins;
  // Several pieces have query heads of one group, or one has several groups.
  const int group = way.heads.group, size = way.heads.size;
  const int every = std::max(group / size, 1), kv_size = std::max(size / group, 1);
  const std::vector<Stretch>& own = way.keys[at(rank())];
  for (int distance = 0; distance < ranks(); ++distance) {
    const int to = (rank() + distance) % ranks();
    const HeadShare share = exchange_.share_of(to);
    const auto put = [&](const std::vector<Stretch>& rows, const Travelling& tensor, int heads,
                         int pieces) {
      for (const Stretch& one : rows) {
        StridedCopy copy = tensor.copy(one, share);
        copy.to = layer_.comm.place_at(copy.to, to);
        puts.add(copy, heads * tensor.own.head_bytes, pieces);
      }
    };
    const std::vector<Stretch> keys =
        distance == 0 && begins ? ends_of(own, KeyArrivals::kMargin) : own;
    put(way.rows[at(rank())], way.own.q, size, 1);
    put(keys, way.own.k, kv_size, every);
    if (has_values()) put(keys, way.own.v, kv_size, every);
  }
  puts.divide();
  return puts;
}

/// The bytes of received rows and keys.
std::size_t HeadPuts::received(const Way& way) const {
  const HeadShare& share = exchange_.share();
  const std::int64_t others_rows = way.tokens - way.rows_of(rank()),
                     others_keys = way.length - count_rows(way.keys[at(rank())]);
  return at(others_rows * way.own.q.row_bytes(share) +
            others_keys *
                (way.own.k.row_bytes(share) + (has_values() ? way.own.v.row_bytes(share) : 0)));
}

/// The bytes of received finished rows.
std::size_t HeadPuts::received_results(const Way& way) const {
  const std::int64_t heads = layer_.bounds.heads - exchange_.share().query.size();
  const std::int64_t with_lse = row_bytes(layer_.options.dtypes.of_out(), layer_.bounds.value_dim) +
                                std::int64_t{sizeof(float)};
  return at(way.rows_of(rank()) * heads * with_lse);
}

/// Puts the finished rows of all heads to their owners, including this rank.
void HeadPuts::take_back(const Run& run, const Way& way) const {
  const HeadShare& share = exchange_.share();
  const FinishedSlot slot = exchange_.finished(way.tokens, rank());
  const std::int64_t head_bytes = row_bytes(slot.dtype, slot.dim);
  const DenseRows rows{exchange_.finished_rows(), slot.heads, head_bytes};
  constexpr std::int64_t kLse = sizeof(float);
  std::byte* const lse = exchange_.finished_rows() + slot.lse_at();
  std::vector<StridedCopy> copies;
  for (int to = 0; to < ranks(); ++to) {
    const std::int64_t theirs = way.rows_of(to);
    const DenseRows place{layer_.comm.place_at(rows_, to), layer_.bounds.heads, head_bytes};
    std::byte* const place_of_lse = layer_.comm.place_at(lse_, to);
    for (const Stretch& one : way.rows[at(to)]) {
      copies.push_back(
          block(rows, one.position, 0, place, one.first, share.query.begin, one.count, slot.heads));
      // An lse is one row of a head.
      copies.push_back({lse + one.position * kLse,
                        place_of_lse + (share.query.begin * theirs + one.first) * kLse,
                        way.tokens * kLse, theirs * kLse, one.count * kLse, slot.heads});
    }
  }
  layer_.kernels.copy_rows(copies, run.stream);
}

/// Copies finished rows into the result, once all have arrived.
void HeadPuts::put_result(const Run& run, const Way& way, const kernels::MergeParams& asked,
                          const PutRanks& putters) const {
  kernels::PackOutputsParams place;
  place.tokens = way.rows_of(rank());
  place.heads = layer_.bounds.heads;
  place.dim = layer_.bounds.value_dim;
  place.dtype = asked.dtype;
  place.from = {rows_, std::int64_t{place.heads} * place.dim, place.dim};
  place.from_lse = {reinterpret_cast<float*>(lse_), 1, place.tokens};
  place.to = asked.out;
  place.to_lse = asked.lse;
  place.headers = asked.headers;
  place.putters = putters;
  layer_.kernels.pack_outputs(place, run.stream);
}

/// The attention waits for the first heads; the exchange of the others, and of the finished rows,
/// overlaps it.
RunCost head_puts_cost(const Options& options, int ranks, const RunSize& size) {
  RunCost cost = head_exchange_cost(options, ranks, size);
  const double row = 1.0 * options.heads * row_bytes(options.dtypes.of_query(), options.head_dim);
  const double sent = size.most_tokens * row +
                      most_keys_of_a_rank(options.keys, size.keys, ranks) * key_row_bytes(options);
  const int pieces = pieces_of_heads(options.heads, options.kv_heads, ranks, sent).count;
  const double results =
      size.most_tokens * options.heads *
      static_cast<double>(row_bytes(options.dtypes.of_out(), options.of_values()) + 4);
  const double operands = cost.received_bytes - results * (ranks - 1) / ranks;
  cost.workspace_bytes += results;
  if (size.tokens >= KeyArrivals::kLeastRows)
    cost.overlapped_bytes = cost.received_bytes - operands / pieces;
  cost.messages = cost.peer_messages = 2;
  cost.copied_bytes = 2 * results;
  return cost;
}

}  // namespace longspan
