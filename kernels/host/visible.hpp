// Finds which of this rank's keys the rows of a tile see (kernels/visible.hpp). If positions ascend
// with the local index, a row sees intervals of local keys, and the whole mask is arithmetic on
// intervals: nothing is computed for segments that no row sees. In a `listed` shard positions have
// any order: every segment is visited and every key tested.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/host/tile.hpp"
#include "kernels/visible.hpp"
#include "longspan/starts.hpp"

namespace longspan::kernels::host {

/// The local keys [first, first + keys) of the sequence; keys <= 128.
struct Segment {
  std::int64_t first = 0;
  int keys = 0;
};

/// The segment of a sequence's keys with this number.
inline Segment segment_of(const Sequence& s, std::int64_t number) {
  const std::int64_t first = number * kSegment;
  return {first, static_cast<int>(std::min<std::int64_t>(kSegment, s.keys - first))};
}

/// The rows of a kv head from `first` on, up to `end` and at most `most`, against all keys.
inline Tile tile_of(const Sequence& s, int kv_head, std::int64_t first, std::int64_t end,
                    int most) {
  return {s,
          kv_head,
          1,
          first,
          static_cast<int>(std::min<std::int64_t>(most, end - first)),
          0,
          s.order.leaves,
          {0, s.keys}};
}

inline Range aligned(Range keys) {
  if (keys.begin == keys.end) return keys;
  return {keys.begin / 16 * 16, (keys.end + 15) / 16 * 16};
}

/// What each row of a tile sees: local keys, or positions if the shard is `listed`.
class TileRows {
 public:
  using Keys = RowKeys<MaskRule::kIntervals>;

  TileRows(const Geometry& params, const Tile& tile)
      : p_(params),
        tile_(tile),
        rule_(params.mask_rule(tile.sequence.index, tile.sequence.kv_len)),
        group_(params.heads / params.kv_heads),
        listed_(tile.sequence.shard.layout == Layout::listed) {}

  bool listed() const { return listed_; }

  Keys operator()(std::int64_t row) const {
    if (found_ != nullptr) return found_[row];
    const Sequence& s = tile_.sequence;
    const Keys seen = rule_(p_.query_position(s.index, token(row), s.kv_len));
    if (listed_) return seen;
    return in_shard(seen, s.shard, s.kv_len, tile_.keys);
  }

  RowOrder order() const {
    if (p_.queries.ranks == 1) return rule_.order(true);
    const int b = tile_.sequence.index;
    const std::int64_t first = token(0), last = token(tile_.rows - 1);
    return rule_.order(p_.query_index(b, last) - p_.query_index(b, first) == last - first);
  }

  /// Computes what every row sees, into memory [rows] that outlives this.
  void find(Keys* found) {
    for (int row = 0; row < tile_.rows; ++row)
      found[row] = row > 0 && (tile_.first + row) % group_ > 0 ? found[row - 1] : (*this)(row);
    found_ = found;
  }

 private:
  std::int64_t token(std::int64_t row) const { return (tile_.first + row) / group_; }

  const Geometry& p_;
  const Tile& tile_;
  MaskRule rule_;
  int group_;
  bool listed_;
  const Keys* found_ = nullptr;  // [rows] what each row sees, if computed
};

/// The part of a segment that lies in an interval of local keys.
inline Range within(const Segment& s, const Interval& local) {
  const auto cut = [&](std::int64_t key) {
    return static_cast<int>(std::clamp<std::int64_t>(key - s.first, 0, s.keys));
  };
  const Range range{cut(local.begin), cut(local.end)};
  return range.begin < range.end ? range : Range{};
}

/// Sets the scores of keys in `range` that a row does not see to -inf; it sees the local keys
/// `seen`.
template <int kCount, class Real>
void hide_unseen(const RowKeys<kCount>& seen, const Segment& segment, Range range, Real* scores) {
  const auto hide = [&](int begin, int end) {
    if (begin < end) std::fill(scores + begin, scores + end, Real{-infinity()});
  };
  int judged = range.begin;  // keys before it
  for (const Interval& one : seen.part) {
    const Range own = within(segment, one);
    if (own.begin == own.end) continue;
    hide(judged, std::min(own.begin, range.end));
    judged = std::max(judged, own.end);
  }
  hide(judged, range.end);
}

/// VisibleBlocks of a tile, segment by segment.
class Visible {
 public:
  Visible(const Geometry& params, const Tile& tile)
      : tile_(tile), rows_(params, tile), blocks_(tile.rows, rows_, rows_.order()) {}
  Visible(const Visible&) = delete;
  Visible& operator=(const Visible&) = delete;

  /// Calls visit(index, segment) for each segment of the tile's leaves that some row may see, in
  /// fold order; `index` is the segment's index in the tree over all leaves.
  template <class Visit>
  void for_each_segment(Visit&& visit) const {
    const SegmentOrder& order = tile_.sequence.order;
    const Interval first_seen = next(0);
    if (first_seen.empty()) return;
    for (int leaf = tile_.first_leaf; leaf < tile_.last_leaf; ++leaf) {
      const std::int64_t count = order.count(leaf);
      const auto start = [&](std::int64_t t) { return order.segment(leaf, t) * kSegment; };
      std::int64_t t = 0;  // the first segment that is not visited yet
      for (Interval seen = first_seen; t < count && !seen.empty(); seen = next(start(t))) {
        t = std::max(t, last_start(count, seen.begin, start));
        if (start(t) + kSegment <= seen.begin) ++t;
        for (; t < count && start(t) < seen.end; ++t) {
          const std::int64_t first = start(t);
          const std::int64_t keys = std::min<std::int64_t>(kSegment, tile_.sequence.keys - first);
          visit(static_cast<std::uint64_t>(leaf) << 48 | static_cast<std::uint64_t>(t),
                Segment{first, static_cast<int>(keys)});
        }
        if (t == count) break;
      }
    }
  }

  /// The hull of the keys of a segment that rows [first_row, last_row] see.
  Range keys(const Segment& segment, int first_row, int last_row) const {
    if (listed()) return within(segment, tile_.keys);
    const Interval all = local(segment);
    if (blocks_.full(all)) return {0, segment.keys};
    return within(segment, blocks_.hull(first_row, last_row, all));
  }

  /// An interval of local keys that holds all that some row sees.
  Interval hull() const { return listed() ? tile_.keys : blocks_.hull(); }

  /// The first local keys at or after `from` that some row may see; empty if there are none.
  Interval next(std::int64_t from) const {
    if (!listed()) return blocks_.next(from);
    const std::int64_t begin = std::max(from, tile_.keys.begin);
    return {begin, std::max(begin, tile_.keys.end)};
  }

  /// Whether some row may see a key of the segment. A rank's rows of a sequence may be far apart,
  /// and see nothing of what lies between.
  bool some_row_sees(const Segment& segment) const {
    const Interval found = next(segment.first);
    return !found.empty() && found.begin < segment.first + segment.keys;
  }

  /// In a `listed` shard: whether some row sees local key `key`.
  bool some_row_sees(std::int64_t key) const {
    const std::int64_t position = tile_.sequence.shard.table[key];
    return blocks_.sees_some({position, position + 1});
  }

  bool listed() const { return rows_.listed(); }
  /// Whether keys() of one row is exactly what it sees of the segment.
  bool sees_intervals() const { return !listed() && rows_.order().ascends; }

  /// Sets the scores of keys in `range` that the row does not see to -inf.
  template <class Real>
  void hide(const Segment& segment, int row, Range range, Real* scores) const {
    if (!listed()) {
      if (segment.keys == kSegment && blocks_.full(local(segment))) return;
      return hide_unseen(blocks_.row(row), segment, range, scores);
    }
    const Interval here = tile_.keys;
    hide_unseen(RowKeys<1>{{here}}, segment, range, scores);
    const TileRows::Keys seen = blocks_.row(row);
    const Range own = within(segment, here);
    for (int j = own.begin; j < own.end; ++j)
      if (!seen.contains(tile_.sequence.shard.table[segment.first + j])) scores[j] = -infinity();
  }

 protected:
  /// Computes what every row sees, unless all see the same, into memory [rows] that outlives this.
  void find_rows(TileRows::Keys* found) {
    if (!blocks_.rows_see_alike()) rows_.find(found);
  }

 private:
  static Interval local(const Segment& s) { return {s.first, s.first + s.keys}; }

  const Tile& tile_;
  TileRows rows_;
  VisibleBlocks<const TileRows&> blocks_;
};

/// The same for a tile of at most `kRows` rows that asks for every row in many segments: rows of a
/// sharded sequence may be so far apart that hardly any segment is seen by all of them.
template <int kRows>
class VisibleRows : public Visible {
 public:
  VisibleRows(const Geometry& params, const Tile& tile) : Visible(params, tile) {
    find_rows(found_);
  }

 private:
  TileRows::Keys found_[kRows];
};

}  // namespace longspan::kernels::host
