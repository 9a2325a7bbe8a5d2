// Attends a batch, cut into tiles (sequence, kv head, rows), which threads take in turn. Where
// there are too few tiles to keep the threads busy (decode), a tile is cut further, by leaves of
// the fixed order. Its parts are whole subtrees, so folding them afterwards, neighbours first, is
// the same tree.
#include <algorithm>
#include <bit>
#include <string>

#include "kernels/host/host.hpp"
#include "kernels/host/tile.hpp"
#include "longspan/error.hpp"

namespace longspan::kernels::host {
namespace {

constexpr int kPartsPerThread = 4;   // enough to even out parts of unequal work
constexpr int kUsualLevels = 16;     // of a tile's stack, at its full number of rows
constexpr int kMostLevels = 64;      // at one row
constexpr int kSegmentsPerPart = 4;  // a part of fewer segments is not worth a fold

std::size_t round_up(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

/// How the scratch is laid out: [batch + 1] first tile of each sequence, then a TileSpace per
/// thread, then the states of parts.
struct Layout {
  int rows;  // most rows of a tile
  std::size_t tiles_bytes, space_bytes, part_bytes;
  int parts;  // most parts, over all tiles

  Layout(const AttendParams& p, int threads)
      : rows(static_cast<int>(std::min<std::int64_t>(
            kTileRows, std::max<std::int64_t>(1, p.tokens) * p.heads / p.kv_heads))),
        tiles_bytes(round_up((p.batch.size + 1) * sizeof(std::int64_t))),
        space_bytes(round_up(std::max(TileSpace::bytes(p, rows, kUsualLevels),
                                      TileSpace::bytes(p, 1, kMostLevels)))),
        part_bytes(round_up(rows * (sizeof(Stats) + 4 * TileSpace::padded(p.value_dim)))),
        parts(kPartsPerThread * threads) {}

  std::size_t total(int threads) const {
    return tiles_bytes + threads * space_bytes + parts * part_bytes;
  }
};

/// The depth of the stack that sequences of this length need.
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
    std::int64_t segments = 0;
    for (int b = 0; b < p.batch.size; ++b) {
      const Sequence s(p, b);
      levels_ = std::max(levels_, levels_of(s.order));
      leaves = std::min(leaves, s.order.leaves);
      segments = std::max(segments, segments_of(s.keys));
    }
    const std::size_t room = layout_.space_bytes - TileSpace::fixed_bytes(p);
    rows_ = static_cast<int>(
        std::min<std::size_t>(layout_.rows, room / TileSpace::row_bytes(p, levels_)));
    first_tile_[0] = 0;
    for (int b = 0; b < p.batch.size; ++b)
      first_tile_[b + 1] = first_tile_[b] + tiles_per_head(Sequence(p, b)) * p.kv_heads;
    while (2 * parts_ * tiles() <= layout_.parts && 2 * parts_ <= leaves &&
           2 * parts_ * kSegmentsPerPart <= segments)
      parts_ *= 2;
  }

  void operator()(ThreadPool& pool) {
    if (p_.parts) return attend_key_parts(pool);
    pool.run(tiles() * parts_, [this](std::int64_t item, int thread) {
      const Tile tile = at(item / parts_, static_cast<int>(item % parts_));
      const TileSpace space(spaces_ + thread * layout_.space_bytes, p_, rows_, levels_);
      attend_tile(p_, tile, space);
      pause(thread);
      if (parts_ == 1) return store(tile, p_.slot, space.stats, space.o);
      std::copy_n(space.stats, tile.rows, part_stats(item));
      std::copy_n(space.o, tile.rows * padded_, part_o(item));
    });
    if (parts_ == 1) return;
    pool.run(tiles(), [this](std::int64_t index, int) {
      const Tile tile = at(index, 0);
      const std::int64_t first = index * parts_;
      for (int distance = 1; distance < parts_; distance *= 2)
        for (std::int64_t a = first; a < first + parts_; a += 2 * distance)
          fold_states(part_stats(a), part_o(a), part_stats(a + distance), part_o(a + distance),
                      tile.rows, padded_);
      store(tile, p_.slot, part_stats(first), part_o(first));
    });
  }

 private:
  /// The calling thread is the pool's first.
  void pause(int thread) const {
    if (thread == 0 && between_) between_();
  }

  std::int64_t tiles() const { return first_tile_[p_.batch.size]; }

  /// Attends where the states of parts of the keys are results themselves, one slot each.
  void attend_key_parts(ThreadPool& pool) {
    pool.run(tiles() * p_.parts.count, [this](std::int64_t item, int thread) {
      const int part = static_cast<int>(item % p_.parts.count);
      Tile tile = at(item / p_.parts.count, 0);
      tile.keys = p_.parts.of(part, tile.sequence.keys);
      tile.last_leaf = tile.sequence.order.leaves;
      const TileSpace space(spaces_ + thread * layout_.space_bytes, p_, rows_, levels_);
      attend_tile(p_, tile, space);
      pause(thread);
      store(tile, p_.slot + part, space.stats, space.o);
    });
  }

  std::int64_t tiles_per_head(const Sequence& s) const {
    if (p_.batch.skips(s.query_len)) return 0;
    return (s.query_len * group_ + rows_ - 1) / rows_;
  }

  /// Gives a tile by its number. Tiles of one kv head follow each other, so that threads share its
  /// keys in the cache; later rows come first, since a causal mask gives them the most work.
  Tile at(std::int64_t index, int part) const {
    const std::int64_t* next = std::upper_bound(first_tile_, first_tile_ + p_.batch.size, index);
    const int b = static_cast<int>(next - first_tile_) - 1;
    const Sequence s(p_, b);
    const std::int64_t per_head = tiles_per_head(s), within = index - first_tile_[b];
    const std::int64_t first = (per_head - 1 - within % per_head) * rows_;
    return {s,
            static_cast<int>(within / per_head),
            first,
            static_cast<int>(std::min<std::int64_t>(rows_, s.query_len * group_ - first)),
            s.order.leaves * part / parts_,
            s.order.leaves * (part + 1) / parts_,
            {0, s.keys}};
  }

  Stats* part_stats(std::int64_t item) const {
    return reinterpret_cast<Stats*>(part_o(item) + rows_ * padded_);
  }
  float* part_o(std::int64_t item) const {
    return reinterpret_cast<float*>(part_states_ + item * layout_.part_bytes);
  }

  /// Stores states in the rows' slot; with `resume`, folds them onto what stands there.
  void store(const Tile& tile, int slot, const Stats* stats, const float* o) const {
    for (int r = 0; r < tile.rows; ++r) {
      const std::int64_t token = tile.sequence.first_row + (tile.first + r) / group_;
      const std::int64_t row = token * p_.heads + tile.kv_head * group_ + (tile.first + r) % group_;
      Stats& to_stats = p_.state.stats(slot)[row];
      float* to = p_.state.o(slot, row);
      const float* from = o + r * padded_;
      if (p_.resume) {
        fold_states(&to_stats, to, stats + r, from, 1, p_.value_dim);
      } else {
        to_stats = stats[r];
        std::copy_n(from, p_.value_dim, to);
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
  int rows_ = 1;    // of a tile
  int levels_ = 1;  // of its stack
  int parts_ = 1;   // of a tile
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
