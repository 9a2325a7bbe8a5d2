#include "src/strategy/shared/head_waves.hpp"

#include <algorithm>
#include <utility>

#include "src/strategy/shared/queue_beside.hpp"
#include "src/strategy/shared/receive_memory.hpp"
#include "src/strategy/shared/stretches.hpp"

namespace longspan {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
std::int64_t bytes_of(DType dtype) { return static_cast<std::int64_t>(size_of(dtype)); }

/// A tensor [rows, heads, columns], dense, of which blocks of some rows and some heads are moved.
struct DenseRows {
  std::byte* data;
  int heads;
  std::int64_t head_bytes;  // of one head of one row

  std::int64_t pitch() const { return heads * head_bytes; }
  std::byte* at(std::int64_t row, int head) const {
    return data + row * pitch() + head * head_bytes;
  }
};

/// The copy of `heads` heads of `rows` rows, which begin at (from_row, from_head) and (to_row,
/// to_head).
StridedCopy block(const DenseRows& from, std::int64_t from_row, int from_head, const DenseRows& to,
                  std::int64_t to_row, int to_head, std::int64_t rows, int heads) {
  return {from.at(from_row, from_head),
          to.at(to_row, to_head),
          from.pitch(),
          to.pitch(),
          heads * from.head_bytes,
          rows};
}

}  // namespace

/// Which rank has which rows and keys, and in how many waves they move.
struct HeadWaves::Way {
  std::vector<std::vector<Stretch>> rows, keys;  // of each rank
  std::int64_t tokens = 0, length = 0;           // of the sequence: rows, and keys
  int waves = 1;

  std::int64_t rows_of(int rank) const { return count_rows(rows[at(rank)]); }
  std::int64_t keys_of(int rank) const { return count_rows(keys[at(rank)]); }
};

HeadWaves::HeadWaves(const Layer& layer, HeadExchange& exchange)
    : layer_(layer), exchange_(exchange) {
  const Options& options = layer_.options;
  if (options.exchange == Exchange::gather) return;
  if (!options.queries) {
    require_exchange(options, false,
                     "strategy heads puts rows of sharded queries there, and no others");
    return;
  }
  const std::int64_t rows = options.limits.max_tokens * options.heads;
  receive_buffer_ = open_receive_memory(layer_, info_, [&](Parts& memory) {
    exchange_.lay_out_whole(memory);
    rows_ = memory.take(at(rows * layer_.bounds.value_dim * bytes_of(options.dtypes.of_out())));
    lse_ = memory.take(at(rows * std::int64_t{sizeof(float)}));
    words_ = memory.take_array<std::uint64_t>(at(ranks()));
  });
}

std::optional<HeadWaves::Way> HeadWaves::way_of(const Run& run) const {
  const RunArrays& arrays = run.arrays;
  if (!is_open() || !is_one_known_sequence(arrays)) return std::nullopt;
  Way way;
  way.tokens = arrays.queries.length;
  way.length = arrays.keys.length;
  for (int p = 0; p < ranks(); ++p) {
    auto rows = stretches_of(arrays.queries.with_rank(p), way.tokens);
    auto keys = stretches_of(arrays.keys.with_rank(p), way.length);
    // Rows that a rank has no room for are refused there, and must not be put either.
    if (!rows || !keys || count_rows(*rows) > layer_.options.limits.max_tokens) return std::nullopt;
    way.rows.push_back(std::move(*rows));
    way.keys.push_back(std::move(*keys));
  }
  way.waves = count_head_waves(
      way.tokens, most_heads(layer_.bounds.heads, layer_.bounds.kv_heads, ranks()).query);
  return way;
}

bool HeadWaves::queue(Run& run) const {
  const std::optional<Way> found = way_of(run);
  if (!found) return false;
  const Way& way = *found;
  run.compare_in(words_, rank());
  run.say_to(layer_.kernels);
  const KeyBlock own = exchange_.ready_keys(run);
  run.enter(Phase::exchange);
  const kernels::AttendParams whole = run.attend;
  const kernels::MergeParams asked = run.merge;
  comm::Transfers coming = bring(run, way, own, 0);
  std::vector<comm::Transfers> leaving(at(way.waves));
  for (int wave = 0; wave < way.waves; ++wave) {
    coming.wait(run.stream);
    run.attend = whole;
    run.merge = asked;
    if (wave + 1 < way.waves)
      queue_beside(
          layer_.comm, run.stream, 1, [&] { attend(run, way, wave); },
          [&] { coming = bring(run, way, own, wave + 1); });
    else
      attend(run, way, wave);
    leaving[at(wave)] = take_back(run, way, wave);
  }
  for (comm::Transfers& one : leaving) one.wait(run.stream);
  run.enter(Phase::merge);
  put_result(run, way, asked);
  return true;
}

/// Puts this rank's rows and keys of a wave's heads to the ranks that attend with them. What stays
/// here goes with the first wave, whatever wave it is of: a GPU copies within itself by a kernel,
/// which beside the attention finds no place before that is done.
comm::Transfers HeadWaves::bring(const Run& run, const Way& way, const KeyBlock& own,
                                 int wave) const {
  const kernels::AttendParams& all = layer_.bounds;
  const std::int64_t q_bytes = all.head_dim * bytes_of(all.q_dtype),
                     k_bytes = all.head_dim * bytes_of(all.kv_dtype),
                     v_bytes = all.value_dim * bytes_of(all.kv_dtype);
  const DenseRows q{static_cast<std::byte*>(run.args.q.data), all.heads, q_bytes},
      k{own.k, all.kv_heads, k_bytes}, v{own.v, all.kv_heads, v_bytes};
  const KeyBlock& whole = exchange_.whole_keys();
  std::vector<comm::Put> puts;
  for (int distance = 0; distance < ranks(); ++distance) {
    const int to = (rank() + distance) % ranks();
    const HeadShare theirs = exchange_.share_of(to);
    if (to == rank() && wave > 0) continue;
    const HeadWave now = to == rank() ? HeadWave{theirs} : wave_of(to, wave, way.waves);
    const auto put = [&](const DenseRows& mine, std::byte* there, HeadRange HeadShare::*range,
                         const std::vector<Stretch>& stretches) {
      const HeadRange heads = now.heads.*range;
      const DenseRows place{there, (theirs.*range).size(), mine.head_bytes};
      for (const Stretch& one : stretches)
        if (heads.size() > 0)
          puts.push_back({to, block(mine, one.first, heads.begin, place, one.position,
                                    heads.begin - (theirs.*range).begin, one.count, heads.size())});
    };
    put(q, exchange_.whole_queries(), &HeadShare::query, way.rows[at(rank())]);
    if (now.needs_keys) {
      put(k, whole.k, &HeadShare::kv, way.keys[at(rank())]);
      put(v, whole.v, &HeadShare::kv, way.keys[at(rank())]);
    }
    if (wave == 0 && distance > 0) {
      auto* const word = reinterpret_cast<std::byte*>(words_ + rank());
      const std::int64_t size = sizeof *words_;
      puts.push_back({to, {word, word, size, size, size, 1}});
    }
  }
  const HeadWave mine = wave_of(rank(), wave, way.waves);
  std::int64_t received = (way.tokens - way.rows_of(rank())) * mine.heads.query.size() * q_bytes;
  if (mine.needs_keys)
    received += (way.length - way.keys_of(rank())) * mine.heads.kv.size() * (k_bytes + v_bytes);
  return start(run, std::move(puts), received, wave > 0, "exchange of rows and keys by heads");
}

/// Attends with a wave's heads; the rows end where they leave from, [tokens, own heads, value_dim],
/// and their lse [own heads, tokens].
void HeadWaves::attend(Run& run, const Way& way, int wave) const {
  const HeadWave now = wave_of(rank(), wave, way.waves);
  if (now.heads.query.size() == 0) return;
  const HeadShare& own = exchange_.share();
  const std::int64_t first = now.heads.query.begin - own.query.begin;
  exchange_.attend_to(run, now.heads);
  const FinishedSlot slot = exchange_.finished(way.tokens, rank());
  std::byte* const rows = exchange_.finished_rows();
  run.merge.headers = {};
  run.merge.out = slot.out(rows + first * slot.dim * bytes_of(slot.dtype));
  run.merge.lse = {reinterpret_cast<float*>(rows + slot.lse_at()) + first * way.tokens, 1,
                   way.tokens};
  run.enter(Phase::attend);
  run.attend_to(run.merge, Phase::exchange, layer_.kernels);
}

/// Puts the finished rows of a wave's heads to the ranks whose they are. This rank's own go with
/// the last wave.
comm::Transfers HeadWaves::take_back(const Run& run, const Way& way, int wave) const {
  const HeadShare& own = exchange_.share();
  const bool is_last = wave + 1 == way.waves;
  const HeadRange wave_heads = wave_of(rank(), wave, way.waves).heads.query;
  const FinishedSlot slot = exchange_.finished(way.tokens, rank());
  const std::int64_t row_bytes = slot.dim * bytes_of(slot.dtype);
  const DenseRows rows{exchange_.finished_rows(), slot.heads, row_bytes},
      place{rows_, layer_.bounds.heads, row_bytes};
  // An lse is one row of a head.
  constexpr std::int64_t kLse = sizeof(float);
  std::byte* const lse = exchange_.finished_rows() + slot.lse_at();
  std::vector<comm::Put> puts;
  for (int distance = 0; distance < ranks(); ++distance) {
    const int to = (rank() + distance) % ranks();
    if (to == rank() && !is_last) continue;
    const HeadRange heads = to == rank() ? own.query : wave_heads;
    if (heads.size() == 0) continue;
    const std::int64_t theirs = way.rows_of(to);
    const int first = heads.begin - own.query.begin;
    for (const Stretch& one : way.rows[at(to)]) {
      puts.push_back({to, block(rows, one.position, first, place, one.first, heads.begin, one.count,
                                heads.size())});
      puts.push_back({to,
                      {lse + (first * way.tokens + one.position) * kLse,
                       lse_ + (heads.begin * theirs + one.first) * kLse, way.tokens * kLse,
                       theirs * kLse, one.count * kLse, heads.size()}});
    }
  }
  std::int64_t received = 0;
  for (int p = 0; p < ranks(); ++p)
    if (p != rank())
      received +=
          way.rows_of(rank()) * wave_of(p, wave, way.waves).heads.query.size() * (row_bytes + kLse);
  return start(run, std::move(puts), received, !is_last, "exchange of results by heads");
}

/// Copies finished rows, as they have come, into the result.
void HeadWaves::put_result(const Run& run, const Way& way,
                           const kernels::MergeParams& asked) const {
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
  layer_.rows.pack_outputs(place, run.stream);
}

comm::Transfers HeadWaves::start(const Run& run, std::vector<comm::Put> rows, std::int64_t received,
                                 bool beside_attention, const char* step) const {
  comm::Puts puts{
      .puts = std::move(rows), .buffer = receive_buffer_.get(), .received = at(received)};
  if (!beside_attention)
    puts.copier = [this](std::span<const StridedCopy> copies, Stream stream) {
      layer_.rows.copy_rows(copies, stream);
    };
  return layer_.comm.start_puts(puts, run.stream, step);
}

RunCost head_waves_cost(const Options& options, int ranks, const RunSize& size) {
  RunCost cost = head_exchange_cost(options, ranks, size);
  const MostHeads most = most_heads(options.heads, options.kv_heads, ranks);
  const int waves = count_head_waves(static_cast<std::int64_t>(size.tokens), most.query);
  const double results = size.most_tokens * options.heads *
                         (options.of_values() * size_of(options.dtypes.of_out()) + sizeof(float));
  cost.workspace_bytes += results;
  cost.overlapped_bytes = cost.received_bytes * (waves - 1) / waves;
  cost.messages = cost.peer_messages = 2;
  cost.calls = waves;
  cost.copied_bytes = 2 * results;
  return cost;
}

}  // namespace longspan
