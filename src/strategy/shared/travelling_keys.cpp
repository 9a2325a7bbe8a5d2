#include "src/strategy/shared/travelling_keys.hpp"

#include <fmt/format.h>

#include "kernels/visible.hpp"
#include "longspan/error.hpp"

namespace longspan {
namespace {

/// The receiver's share of the query rows.
Shard rows_of_receiver(const Run& run, int receiver) {
  return run.attend.queries.ranks == 1 ? Shard{} : run.attend.queries.with_rank(receiver);
}

/// What all rows of sequence b in a share see of `keys`; there is at least one.
auto visible_to(const kernels::Geometry& g, int b, const Shard& queries, std::int64_t kv_len,
                const Shard& keys) {
  const std::int64_t whole_rows = g.batch.query_len(b, g.tokens),
                     own = queries.local_len(whole_rows);
  const kernels::ShardedRows<kernels::MaskRule> rows{g.mask_rule(b, kv_len), queries, whole_rows,
                                                     keys, whole_rows - g.used_query_len(b)};
  return kernels::VisibleBlocks(own, rows, rows.order(0, own));
}

/// Whether some of the receiver's rows of sequence b see some of the owner's keys.
bool sees_some(const kernels::Geometry& g, int b, const Shard& receiver, const Shard& owner) {
  const std::int64_t rows = g.batch.query_len(b, g.tokens), kv_len = g.batch.keys(b, owner);
  if (g.batch.skips(rows) || receiver.local_len(rows) == 0 || owner.local_len(kv_len) == 0)
    return false;
  return !visible_to(g, b, receiver, kv_len, owner).next(0).empty();
}

bool knows_lengths(const Run& run, Device device) {
  return device == Device::host ||
         (run.arrays.kv_len == nullptr && run.arrays.keys.layout != Layout::ranges);
}

/// Whether this CPU knows what every row sees.
bool knows_masks(const Run& run, Device device) {
  if (run.arrays.keys.layout == Layout::listed) return false;
  return device == Device::host ||
         (knows_lengths(run, device) && run.arrays.causal == nullptr && !run.arrays.documents &&
          !run.arrays.ranges && run.arrays.prefix == nullptr &&
          run.arrays.left_padding == nullptr && run.arrays.used_rows == nullptr &&
          run.arrays.query_start == nullptr && run.arrays.queries.layout != Layout::ranges);
}

}  // namespace

std::string refuse_travelling_keys(const Options& o, int ranks) {
  const Limits& limits = o.limits;
  if (limits.max_kv_len == 0) return "it needs max_kv_len, for its workspace";
  const auto rows =
      static_cast<double>(most_keys_of_a_rank(o.keys, limits, limits.max_batch, ranks));
  const double bytes = rows * ranks * key_row_bytes(o);
  if (bytes < 0x1p48) return "";  // more than any machine has; sums of less do not overflow
  return fmt::format(
      "{} sequences (max_batch) of {} keys (max_kv_len) take {:.3g} bytes; max_total_keys says how "
      "many keys they have together",
      limits.max_batch, limits.max_kv_len, bytes);
}

bool may_see(const Run& run, Device device, int receiver, int owner) {
  if (!knows_masks(run, device)) return true;
  const kernels::Geometry all = run.all_rows();
  const Shard rows = rows_of_receiver(run, receiver);
  const Shard keys = run.arrays.keys.with_rank(owner);
  for (int b = 0; b < run.arrays.batch; ++b)
    if (sees_some(all, b, rows.for_sequence(b), keys.for_sequence(b))) return true;
  return false;
}

Interval keys_seen(const Run& run, Device device, int receiver) {
  const std::int64_t length = run.arrays.keys.length;
  if (!knows_masks(run, device)) return {0, length};
  const kernels::Geometry all = run.all_rows();
  const Shard rows = rows_of_receiver(run, receiver);
  if (rows.local_len(all.batch.query_len(0, all.tokens)) == 0) return {};
  const Interval hull = visible_to(all, 0, rows, length, {}).hull();
  return hull.empty() ? Interval{} : hull;
}

void append_new_keys(const LayerContext& layer, Pass& pass) {
  if (pass.attend.new_k.data == nullptr) return;
  kernels::AppendParams append = append_of(pass.attend);
  const kernels::Geometry all = pass.run.all_rows();
  append.tokens = all.tokens;
  append.batch = all.batch;
  layer.kernels.append(append, pass.run.stream);
  pass.attend.new_k = pass.attend.new_v = {};
}

TravellingKeys::TravellingKeys(const LayerContext& layer)
    : layer_(layer),
      most_keys_(
          most_keys_of_a_rank(layer.options.keys, layer.bounds.max_kv_len, layer.comm.size())),
      block_rows_(most_rows(layer.bounds.batch.size)) {}

std::int64_t TravellingKeys::most_rows(std::int64_t batch) const {
  return most_keys_of_a_rank(layer_.options.keys, layer_.options.limits, batch, layer_.comm.size());
}

KeyBlock TravellingKeys::take_block(Parts& memory, std::int64_t rows) const {
  const auto count = static_cast<std::size_t>(rows);
  KeyBlock block;
  block.k = memory.take(count * static_cast<std::size_t>(key_bytes()));
  if (has_values()) block.v = memory.take(count * static_cast<std::size_t>(value_bytes()));
  block.start = memory.take_array<std::int64_t>(static_cast<std::size_t>(layer_.bounds.batch.size));
  if (is_listed()) block.positions = memory.take_array<std::int64_t>(count);
  return block;
}

void TravellingKeys::lay_out(Parts& memory) {
  row_starts_ =
      memory.take_array<std::int32_t>(static_cast<std::size_t>(layer_.bounds.batch.size) + 1);
}

void TravellingKeys::check(const Run& run, const char* strategy) const {
  const auto refuse = [&](const char* what) {
    throw Unsupported(
        fmt::format("strategy {} does not take {}; gather-states does", strategy, what));
  };
  if (run.arrays.queries.layout == Layout::listed) refuse("listed query rows");
  if (layer_.comm.size() == 1) return;
  if (is_listed() && layer_.kernels.device() != Device::host) refuse("listed keys on a GPU");
  if (run.arrays.keys.length > layer_.bounds.max_kv_len)
    throw InputError(fmt::format("total_keys is {}; the layer was made for {} (max_kv_len)",
                                 run.arrays.keys.length, layer_.bounds.max_kv_len));
  if (layer_.options.limits.dense_keys && must_copy(run))
    throw InputError(
        "k and v of this run cannot be sent from where they lie (pages, strides, room between "
        "sequences, or on a GPU lengths that only the device knows), and the layer was made for "
        "runs of which they can (dense_keys)");
}

bool TravellingKeys::knows_lengths(const Run& run) const {
  return longspan::knows_lengths(run, layer_.kernels.device());
}

void TravellingKeys::begin(Pass& pass) const {
  append_new_keys(layer_, pass);
  const Run& run = pass.run;
  const Shard& rows = pass.attend.queries;
  if (rows.ranks > 1 && run.arrays.query_start != nullptr) {
    layer_.kernels.row_starts(
        {rows, run.arrays.query_start, run.arrays.batch, row_starts_, pass.attend.tokens},
        run.stream);
    pass.attend.batch.query_start = row_starts_;
    pass.merge.batch.size = run.arrays.batch;
    pass.merge.batch.query_start = row_starts_;
  }
}

std::int64_t TravellingKeys::rows_of(const Run& run, int rank) const {
  if (is_listed()) return listed_of(run, rank);
  if (!knows_lengths(run)) return most_rows(run.arrays.batch);
  const Shard shard = run.arrays.keys.with_rank(rank);
  std::int64_t rows = 0;
  for (int b = 0; b < run.arrays.batch; ++b)
    rows += shard.for_sequence(b).local_len(run.attend.batch.keys(b, shard));
  return rows;
}

bool TravellingKeys::are_seen(const Run& run, int receiver, int owner) const {
  return rows_of(run, owner) > 0 && may_see(run, layer_.kernels.device(), receiver, owner);
}

bool TravellingKeys::must_copy(const Run& run) const {
  const auto is_dense = [&](const kernels::KvRows& rows, int dim) {
    const kernels::KvRows dense = rows_at(nullptr, dim);
    return rows.row_stride == dense.row_stride &&
           (rows.head_stride == dense.head_stride || layer_.bounds.kv_heads == 1) && rows.dense();
  };
  const kernels::AttendParams& p = run.attend;
  const bool one_after_the_other = run.arrays.batch == 1 || p.batch.key_start != nullptr;
  return p.pages || !knows_lengths(run) || !one_after_the_other ||
         !is_dense(p.k, layer_.bounds.head_dim) ||
         (has_values() && !is_dense(p.v, layer_.bounds.value_dim));
}

KeyBlock TravellingKeys::in_place(const Run& run) const {
  return {static_cast<std::byte*>(run.attend.k.data), static_cast<std::byte*>(run.attend.v.data),
          const_cast<std::int64_t*>(run.attend.batch.key_start),
          const_cast<std::int64_t*>(is_listed() ? run.arrays.keys.table : nullptr)};
}

void TravellingKeys::copy_to(const Run& run, const KeyBlock& block) const {
  const int own = layer_.comm.rank();
  if (run.arrays.batch > 1) find_starts(run, own, block);
  kernels::CopyKeysParams copy;
  copy.geometry = run.all_rows();
  copy.k = run.attend.k;
  copy.v = run.attend.v;
  copy.pages = run.attend.pages;
  copy.to_k = block.k;
  copy.to_v = has_values() ? block.v : nullptr;
  copy.to_start = run.arrays.batch > 1 ? block.start : nullptr;
  copy.rows = rows_of(run, own);
  copy.longest = longest(run, own);
  layer_.kernels.copy_keys(copy, run.stream);
}

KeyBlock TravellingKeys::own_keys(const Run& run, const KeyBlock& room) const {
  const KeyBlock lying = in_place(run);
  if (!must_copy(run)) return lying;
  copy_to(run, room);
  KeyBlock own = room;
  own.positions = lying.positions;
  return own;
}

void TravellingKeys::attend_to(Pass& pass, const KeyBlock& block, const Shard& shard) const {
  pass.attend.k = keys_in(block);
  pass.attend.v = values_in(block);
  pass.attend.pages = {};
  pass.attend.batch.key_start = pass.run.arrays.batch > 1 ? block.start : nullptr;
  pass.attend.batch.key_pitch = 0;
  pass.attend.shard = shard;
}

void TravellingKeys::find_starts(const Run& run, int rank, const KeyBlock& block) const {
  if (run.arrays.batch == 1) return;
  layer_.kernels.key_starts(
      {run.arrays.keys.with_rank(rank), run.arrays.kv_len, 0, run.arrays.batch, block.start},
      run.stream);
}

std::size_t TravellingKeys::list_pieces(const Run& run, const Move& move, const KeyBlock& own,
                                        const KeyBlock& to, comm::Piece* pieces) const {
  const int rank = layer_.comm.rank(), ranks = layer_.comm.size();
  const int from = (rank - move.distance + ranks) % ranks;
  const auto bytes = [&](bool is_moved, int owner, std::int64_t row_bytes) {
    return is_moved ? static_cast<std::size_t>(rows_of(run, owner) * row_bytes) : 0;
  };
  std::size_t count = 0;
  const auto add = [&](const void* sent, void* received, std::int64_t row_bytes) {
    pieces[count++] = {sent, bytes(move.sends, rank, row_bytes), received,
                       bytes(move.receives, from, row_bytes)};
  };
  add(own.k, to.k, key_bytes());
  if (has_values()) add(own.v, to.v, value_bytes());
  if (to.positions != nullptr) add(own.positions, to.positions, sizeof(std::int64_t));
  return count;
}

void TravellingKeys::find_whole_starts(const Run& run, const KeyBlock& block,
                                       const Shard& part) const {
  if (run.arrays.batch > 1)
    layer_.kernels.key_starts({part, run.arrays.kv_len, 0, run.arrays.batch, block.start},
                              run.stream);
}

void TravellingKeys::copy_in_order(const Run& run, int rank, const KeyBlock& from,
                                   const KeyBlock& to, const Shard& part) const {
  kernels::CopyKeysParams copy;
  copy.geometry = run.all_rows();
  copy.geometry.kv_heads = layer_.bounds.kv_heads;
  copy.geometry.shard = shard_of(run, rank, from);
  copy.geometry.batch.key_start = run.arrays.batch > 1 ? from.start : nullptr;
  copy.geometry.batch.key_pitch = 0;
  copy.k = keys_in(from);
  copy.v = values_in(from);
  copy.to_k = to.k;
  copy.to_v = to.v;
  copy.to_start = run.arrays.batch > 1 ? to.start : nullptr;
  copy.by_position = true;
  copy.part = part;
  copy.rows = most_keys_of_a_rank({part.layout, part.block}, layer_.options.limits,
                                  run.arrays.batch, part.ranks);
  copy.longest = longest(run, rank);
  layer_.kernels.copy_keys(copy, run.stream);
}

kernels::KvRows TravellingKeys::keys_in(const KeyBlock& block) const {
  return rows_at(block.k, layer_.bounds.head_dim);
}
kernels::KvRows TravellingKeys::values_in(const KeyBlock& block) const {
  if (!has_values()) return keys_in(block);
  return rows_at(block.v, layer_.bounds.value_dim);
}

Shard TravellingKeys::shard_of(const Run& run, int rank, const KeyBlock& block) const {
  Shard shard = run.arrays.keys.with_rank(rank);
  if (is_listed()) {
    shard.table = block.positions;
    shard.listed = listed_of(run, rank);
  }
  return shard;
}

}  // namespace longspan
