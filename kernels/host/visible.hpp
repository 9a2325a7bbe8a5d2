// Finds which of this rank's keys the rows of a tile see. If positions ascend with the local index,
// the keys that a row sees are an interval of local keys, and the whole mask is arithmetic on
// intervals: nothing is computed for segments that no row sees. In a `listed` shard positions have
// any order: every segment is visited and every key tested.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/host/tile.hpp"
#include "longspan/starts.hpp"

namespace longspan::kernels::host {

/// The local keys [first, first + keys) of the sequence; keys <= 128.
struct Segment {
  std::int64_t first = 0;
  int keys = 0;
};

inline Range aligned(Range keys) {
  if (keys.begin == keys.end) return keys;
  return {keys.begin / 16 * 16, (keys.end + 15) / 16 * 16};
}

class Visible {
 public:
  Visible(const Geometry& params, const Tile& tile)
      : p_(params),
        tile_(tile),
        group_(params.heads / params.kv_heads),
        listed_(tile.sequence.shard.layout == Layout::listed) {
    const Interval first = local_keys(0), last = local_keys(tile.rows - 1);
    any_ = {first.begin, last.end};  // both ends ascend with the row
    all_ = {last.begin, first.end};
  }

  /// Calls visit(index, segment) for each segment of the tile's leaves that some row may see, in
  /// fold order; `index` is the segment's index in the tree over all leaves.
  template <class Visit>
  void for_each_segment(Visit&& visit) const {
    if (any_.empty()) return;
    const SegmentOrder& order = tile_.sequence.order;
    for (int leaf = tile_.first_leaf; leaf < tile_.last_leaf; ++leaf) {
      const std::int64_t count = order.count(leaf);
      const auto start = [&](std::int64_t t) { return order.segment(leaf, t) * kSegment; };
      std::int64_t t = last_start(count, any_.begin, start);
      if (t < count && start(t) + kSegment <= any_.begin) ++t;
      for (; t < count; ++t) {
        const std::int64_t first = start(t);
        if (first >= any_.end) break;
        const std::int64_t keys = std::min<std::int64_t>(kSegment, tile_.sequence.keys - first);
        visit(static_cast<std::uint64_t>(leaf) << 48 | static_cast<std::uint64_t>(t),
              Segment{first, static_cast<int>(keys)});
      }
    }
  }

  /// The hull of the keys of a segment that rows [first_row, last_row] see.
  Range keys(const Segment& segment, int first_row, int last_row) const {
    if (full(segment)) return {0, segment.keys};
    return within(segment, {local_keys(first_row).begin, local_keys(last_row).end});
  }

  /// The local keys that some row may see.
  Interval any() const { return any_; }

  /// Whether some row may see a key of the segment. A rank's rows of a sequence may be far apart,
  /// and see nothing of what lies between.
  bool some_row_sees(const Segment& segment) const {
    int first = 0, last = tile_.rows;  // the first row that does not end before the segment
    while (first < last) {
      const int row = first + (last - first) / 2;
      if (local_keys(row).end > segment.first)
        last = row;
      else
        first = row + 1;
    }
    return first < tile_.rows && local_keys(first).begin < segment.first + segment.keys;
  }

  /// Whether some row sees local key `key` of the hull. In a `listed` shard the hull says little.
  bool some_row_sees(std::int64_t key) const {
    return !listed_ || Interval{positions(0).begin, positions(tile_.rows - 1).end}.contains(
                           tile_.sequence.shard.table[key]);
  }
  bool listed() const { return listed_; }
  /// Whether no key is seen by some rows only.
  bool rows_see_alike() const { return any_.begin == all_.begin && any_.end == all_.end; }

  /// Sets the scores of keys in `range` that the row does not see to -inf.
  void hide(const Segment& segment, int row, Range range, float* scores) const {
    if (full(segment) && segment.keys == kSegment) return;
    const Range own = keys(segment, row, row);
    std::fill(scores + range.begin, scores + std::max(own.begin, range.begin), -infinity());
    std::fill(scores + std::min(own.end, range.end), scores + range.end, -infinity());
    if (!listed_) return;
    const Interval seen = positions(row);
    for (int j = own.begin; j < own.end; ++j)
      if (!seen.contains(tile_.sequence.shard.table[segment.first + j])) scores[j] = -infinity();
  }

 protected:
  /// Computes what every row sees, into memory [rows] that outlives this.
  void find_rows(Interval* found) {
    for (int row = 0; row < tile_.rows; ++row)
      found[row] = row > 0 && (tile_.first + row) % group_ > 0 ? found[row - 1] : local_keys(row);
    found_ = found;
  }

 private:
  Interval positions(int row) const {
    const Sequence& s = tile_.sequence;
    const std::int64_t token = (tile_.first + row) / group_;
    Interval seen = p_.visible(s.index, p_.query_position(s.index, token, s.kv_len), s.kv_len);
    if (p_.documents) {
      // Rows outside of all documents see nothing. Their empty interval must not extend the hull of
      // the rows beside them over outside keys, which no row sees.
      const Documents& d = p_.documents;
      const std::int64_t begin = d.count > 0 ? d.start[0] : 0;
      const std::int64_t end = d.count > 0 ? d.start[d.count] : 0;
      seen = {std::clamp(seen.begin, begin, end), std::clamp(seen.end, begin, end)};
    }
    return seen;
  }

  /// The hull of the local keys that a row sees; an empty one may have its end before its begin.
  Interval local_keys(int row) const {
    if (listed_) return tile_.keys;
    if (found_ != nullptr) return found_[row];
    const Interval seen = positions(row);
    const Sequence& s = tile_.sequence;
    const auto cut = [&](std::int64_t position) {
      return std::clamp(s.shard.before(position, s.kv_len), tile_.keys.begin, tile_.keys.end);
    };
    return {cut(seen.begin), cut(seen.end)};
  }

  bool full(const Segment& s) const {
    return !listed_ && s.first >= all_.begin && s.first + s.keys <= all_.end;
  }

  static Range within(const Segment& s, Interval local) {
    const auto cut = [&](std::int64_t key) {
      return static_cast<int>(std::clamp<std::int64_t>(key - s.first, 0, s.keys));
    };
    const Range range{cut(local.begin), cut(local.end)};
    return range.begin < range.end ? range : Range{};
  }

  const Geometry& p_;
  const Tile& tile_;
  int group_;
  bool listed_;
  Interval any_;  // local keys that some row sees, and that all see
  Interval all_;
  const Interval* found_ = nullptr;  // [rows] what each row sees, if computed
};

/// The same for a tile of at most `kRows` rows that asks for every row in many segments: rows of a
/// sharded sequence may be so far apart that hardly any segment is seen by all of them.
template <int kRows>
class VisibleRows : public Visible {
 public:
  VisibleRows(const Geometry& params, const Tile& tile) : Visible(params, tile) {
    if (!listed() && !rows_see_alike()) find_rows(rows_);
  }
  VisibleRows(const VisibleRows&) = delete;
  VisibleRows& operator=(const VisibleRows&) = delete;

 private:
  Interval rows_[kRows];
};

}  // namespace longspan::kernels::host
