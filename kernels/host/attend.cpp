// Attends a batch, cut into tiles (sequence, kv head, rows), which threads take in turn. If there
// are too few tiles to keep the threads busy (decode), a tile is cut further, by leaves of the
// fixed order. Its parts are whole subtrees, so folding them afterwards, neighbours first, gives
// the same tree.
#include <algorithm>
#include <array>
#include <bit>
#include <optional>
#include <string>

#include "kernels/host/bf16_tile.hpp"
#include "kernels/host/families.hpp"
#include "kernels/host/host.hpp"
#include "kernels/host/packed_keys.hpp"
#include "kernels/host/tile.hpp"
#include "longspan/error.hpp"

namespace longspan::kernels::host {
namespace {

constexpr int kPartsPerThread = 4;  // enough to even out parts of unequal work
constexpr auto kAmx = static_cast<std::size_t>(OnHost::Id::amx);
constexpr auto kVectors = static_cast<std::size_t>(OnHost::Id::vectors);
constexpr int kSegmentsPerPart = 4;  // a part of fewer segments is not worth a fold

std::size_t round_up(std::size_t bytes) { return (bytes + 255) / 256 * 256; }
int round_up(int rows, int step) { return (rows + step - 1) / step * step; }

/// The layout of the scratch: [batch + 1] first tile of each sequence, then a TileSpace (or
/// Bf16Space) per thread, then the states of parts, then keys that are packed in advance.
struct Layout {
  std::array<int, kFamilies> rows;  // most rows of a tile of each family; 0 if no call uses it
  std::size_t tiles_bytes, space_bytes = 0, part_bytes, packed_bytes;
  int parts;  // most parts, over all tiles

  Layout(const AttendParams& p, int threads)
      : tiles_bytes(round_up((p.batch.size + 1) * sizeof(std::int64_t))),
        packed_bytes(PackedKeys::bytes(p)),
        parts(kPartsPerThread * threads) {
    for (const HostFamily& family : families()) {
      const OnHost::Room room = family.scratch(p, 0);
      rows[static_cast<std::size_t>(family.id)] = room.rows;
      space_bytes = std::max(space_bytes, round_up(room.bytes));
    }
    part_bytes = round_up(*std::max_element(rows.begin(), rows.end()) *
                          (sizeof(Stats) + 4 * TileSpace::padded(p.value_dim)));
  }

  std::size_t total(int threads) const {
    return tiles_bytes + threads * space_bytes + parts * part_bytes + packed_bytes;
  }
};

/// The depth of the stack for sequences of this length.
int levels_of(const SegmentOrder& order) {
  std::int64_t most = 1;
  for (int leaf = 0; leaf < order.leaves; ++leaf) most = std::max(most, order.count(leaf));
  return std::bit_width(static_cast<std::uint64_t>(most - 1)) + log2_ceil(order.leaves) + 1;
}

class AttendRun {
 public:
  AttendRun(const AttendParams& p, int threads, const BetweenTiles& between)
      : p_(p),
        between_(between),
        group_(p.heads / p.kv_heads),
        padded_(TileSpace::padded(p.value_dim)),
        layout_(p, threads),
        first_tile_(reinterpret_cast<std::int64_t*>(p.scratch)),
        spaces_(p.scratch + layout_.tiles_bytes),
        part_states_(spaces_ + threads * layout_.space_bytes) {
    int leaves = kVirtualRanks;
    std::int64_t segments = 0, rows = 0;
    for (int b = 0; b < p.batch.size; ++b) {
      const Sequence s(p, b);
      levels_ = std::max(levels_, levels_of(s.order));
      leaves = std::min(leaves, s.order.leaves);
      segments = std::max(segments, segments_of(s.keys));
      rows += s.query_len * p.heads;
    }
    const std::size_t room = layout_.space_bytes - TileSpace::fixed_bytes(p);
    rows_ = static_cast<int>(
        std::min<std::size_t>(layout_.rows[kVectors], room / TileSpace::row_bytes(p, levels_)));
    if (layout_.rows[kAmx] > 0) {
      const std::size_t bf16_room = layout_.space_bytes - Bf16Space::fixed_bytes(p);
      bf16_rows_ = static_cast<int>(std::min<std::size_t>(
          layout_.rows[kAmx],
          bf16_room / Bf16Space::row_bytes(p, levels_) / kBf16BlockRows * kBf16BlockRows));
    }
    // Smaller tiles, if large ones are too few to balance the threads' work.
    const std::int64_t share = rows / layout_.parts;
    const auto even_out = [&](int most, int least, int step) {
      if (share >= most || most <= least) return most;
      return std::min(most, std::max(least, round_up(static_cast<int>(share), step)));
    };
    rows_ = even_out(rows_, kSmallTileRows, kBlockRows);
    bf16_rows_ = even_out(bf16_rows_, 6 * kBf16BlockRows, kBf16BlockRows);
    int most_parts = 1;
    while (2 * most_parts <= leaves && 2 * most_parts * kSegmentsPerPart <= segments)
      most_parts *= 2;
    const bool side_by_side =
        has_few_rows() && reads_in_place(p) && p.k.head_stride < p.k.row_stride;
    heads_ = side_by_side ? p.kv_heads : 1;
    while (heads_ > 1 && p.batch.size * head_groups(heads_) * most_parts < layout_.parts)
      heads_ = (heads_ + 1) / 2;
    first_tile_[0] = 0;
    for (int b = 0; b < p.batch.size; ++b)
      first_tile_[b + 1] = first_tile_[b] + tiles_of(Sequence(p, b));
    while (2 * parts_ * tiles() <= layout_.parts && 2 * parts_ <= most_parts) parts_ *= 2;
    packed_.emplace(p_, part_states_ + layout_.parts * layout_.part_bytes,
                    [this](const Sequence& s) { return tiles_per_head(s) > 1; });
  }

  void operator()(ThreadPool& pool) {
    const std::int64_t heads = std::int64_t{p_.batch.size} * p_.kv_heads;
    for (PackedKeys::Round round{0, 0}; round.end < heads;) {
      round = packed_->round(round.end);
      packed_->pack(
          pool, round, [this](int thread) { return bf16_space(thread).wide; }, between_);
      const std::int64_t first = tiles_before(round.begin), end = tiles_before(round.end);
      if (p_.parts)
        attend_key_parts(pool, first, end);
      else
        attend_tiles(pool, first, end);
    }
    if (!p_.parts && parts_ > 1) fold_parts(pool);
  }

 private:
  void attend_tiles(ThreadPool& pool, std::int64_t first, std::int64_t end) {
    pool.run((end - first) * parts_, [&](std::int64_t number, int thread) {
      const std::int64_t item = first * parts_ + number;
      const Tile tile = at(item / parts_, static_cast<int>(item % parts_));
      const auto [stats, o] = attend(tile, thread);
      if (parts_ == 1) return store(tile, p_.slot, stats, o);
      std::copy_n(stats, tile.states(), part_stats(item));
      std::copy_n(o, tile.states() * padded_, part_o(item));
    });
  }

  void fold_parts(ThreadPool& pool) {
    pool.run(tiles(), [this](std::int64_t index, int) {
      const Tile tile = at(index, 0);
      const std::int64_t first = index * parts_;
      for (int distance = 1; distance < parts_; distance *= 2)
        for (std::int64_t a = first; a < first + parts_; a += 2 * distance)
          fold_states(part_stats(a), part_o(a), part_stats(a + distance), part_o(a + distance),
                      tile.states(), padded_);
      store(tile, p_.slot, part_stats(first), part_o(first));
    });
  }

  Bf16Space bf16_space(int thread) const {
    return {spaces_ + thread * layout_.space_bytes, p_, bf16_rows_, levels_};
  }

  /// Attends a tile in the thread's memory, where its states stay.
  TileStates attend(const Tile& tile, int thread) const {
    const TileStates states =
        serving(p_, tile.sequence.index)
            .attend(p_, {tile, packed_->of(tile), spaces_ + thread * layout_.space_bytes,
                         rows_of(tile.sequence), levels_});
    pause(thread);
    return states;
  }

  /// The calling thread is the pool's first.
  void pause(int thread) const {
    if (thread == 0 && between_) between_();
  }

  std::int64_t tiles() const { return first_tile_[p_.batch.size]; }

  /// Attends if the states of parts of the keys are themselves results, one slot each.
  void attend_key_parts(ThreadPool& pool, std::int64_t first, std::int64_t end) {
    pool.run((end - first) * p_.parts.count, [&](std::int64_t number, int thread) {
      const std::int64_t item = first * p_.parts.count + number;
      const int part = static_cast<int>(item % p_.parts.count);
      Tile tile = at(item / p_.parts.count, 0);
      tile.keys = p_.parts.of(part, tile.sequence.keys);
      tile.last_leaf = tile.sequence.order.leaves;
      const auto [stats, o] = attend(tile, thread);
      store(tile, p_.slot + part, stats, o);
    });
  }

  bool is_amx(const Sequence& s) const { return serving(p_, s.index).id == OnHost::Id::amx; }

  /// The rows of a sequence's tiles.
  int rows_of(const Sequence& s) const { return is_amx(s) ? bf16_rows_ : rows_; }

  std::int64_t tiles_per_head(const Sequence& s) const {
    if (p_.batch.skips(s.query_len)) return 0;
    const int rows = rows_of(s);
    return (s.query_len * group_ + rows - 1) / rows;
  }

  /// The tiles before a head of a round (PackedKeys).
  std::int64_t tiles_before(std::int64_t head) const {
    const int b = static_cast<int>(head / p_.kv_heads),
              within = static_cast<int>(head % p_.kv_heads);
    return first_tile_[b] + (within > 0 ? within * tiles_per_head(Sequence(p_, b)) : 0);
  }

  int head_groups(int heads) const { return (p_.kv_heads + heads - 1) / heads; }

  /// The kv heads of a tile. If few rows read the keys, the heads of a key are adjacent in memory
  /// and are read together.
  int heads_of(const Sequence& s) const {
    const std::int64_t rows = s.query_len * group_;
    if (rows == 0 || rows > kFewRows || is_amx(s)) return 1;
    return std::clamp(static_cast<int>(rows_ / rows), 1, heads_);
  }

  std::int64_t tiles_of(const Sequence& s) const {
    return tiles_per_head(s) * head_groups(heads_of(s));
  }

  /// Returns a tile by its number. Tiles of one kv head follow each other, so that threads share
  /// its keys in the cache. Later rows come first, since a causal mask gives them the most work.
  Tile at(std::int64_t index, int part) const {
    const std::int64_t* next = std::upper_bound(first_tile_, first_tile_ + p_.batch.size, index);
    const int b = static_cast<int>(next - first_tile_) - 1;
    const Sequence s(p_, b);
    const std::int64_t per_head = tiles_per_head(s), within = index - first_tile_[b];
    const int rows = rows_of(s);
    const std::int64_t first = (per_head - 1 - within % per_head) * rows;
    const int heads = heads_of(s), head = static_cast<int>(within / per_head) * heads;
    return {s,
            head,
            std::min(heads, p_.kv_heads - head),
            first,
            static_cast<int>(std::min<std::int64_t>(rows, s.query_len * group_ - first)),
            s.order.leaves * part / parts_,
            s.order.leaves * (part + 1) / parts_,
            {0, s.keys}};
  }

  Stats* part_stats(std::int64_t item) const {
    return reinterpret_cast<Stats*>(part_o(item) + std::max(rows_, bf16_rows_) * padded_);
  }
  float* part_o(std::int64_t item) const {
    return reinterpret_cast<float*>(part_states_ + item * layout_.part_bytes);
  }

  /// Stores states in the rows' slot; with `resume`, folds them into the states there.
  void store(const Tile& tile, int slot, const Stats* stats, const float* o) const {
    const int columns = p_.state.columns();
    for (int i = 0; i < tile.states(); ++i) {
      const std::int64_t of_head = tile.first + i % tile.rows;
      const std::int64_t token = tile.sequence.first_row + of_head / group_;
      const int kv_head = tile.kv_head + i / tile.rows;
      const std::int64_t row = token * p_.heads + kv_head * group_ + of_head % group_;
      Stats& to_stats = p_.state.stats(slot)[row];
      float* to = p_.state.o(slot, row);
      const float* from = o + i * padded_;
      if (p_.resume) {
        fold_states(&to_stats, to, stats + i, from, 1, columns);
      } else {
        to_stats = stats[i];
        std::copy_n(from, columns, to);
      }
    }
  }

  const AttendParams& p_;
  const BetweenTiles& between_;
  const int group_;
  const int padded_;
  const Layout layout_;
  std::int64_t* const first_tile_;  // [batch + 1]
  std::byte* const spaces_;
  std::byte* const part_states_;
  int rows_ = 1;       // of a tile
  int bf16_rows_ = 0;  // of a tile with products of bf16
  int heads_ = 1;      // most kv heads of a tile of few rows
  int levels_ = 1;     // of its stack
  int parts_ = 1;      // of a tile
  std::optional<PackedKeys> packed_;
};

}  // namespace

std::size_t attend_scratch(const AttendParams& bounds, int threads) {
  return Layout(bounds, threads).total(threads);
}

void attend(const AttendParams& p, ThreadPool& pool, const BetweenTiles& between) {
  if (p.scratch_bytes < attend_scratch(p, pool.size()))
    throw Error(ErrorKind::internal, "host attend was given " + std::to_string(p.scratch_bytes) +
                                         " bytes of scratch and needs " +
                                         std::to_string(attend_scratch(p, pool.size())));
  if (p.tokens == 0) return;
  AttendRun(p, pool.size(), between)(pool);
}

}  // namespace longspan::kernels::host
