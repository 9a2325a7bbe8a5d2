// What rows see: for each row a few intervals of keys. For a block of rows, VisibleBlocks answers
//
//     hull   which interval of keys holds everything that some row sees
//     full   whether every row sees all of these keys, which then need no mask
//     next   the next keys that some row sees; those before them are skipped
//     row    what one row sees, where the mask differs between rows
//
// MaskRule makes a row's intervals from its position, and in_shard finds the local keys in them. In
// most masks both ends ascend with the row. The rule says so in its RowOrder, and a few rows then
// answer for all. For any other rule all rows are asked.
#pragma once

#include <cstdint>

#include "longspan/mask.hpp"
#include "longspan/shard.hpp"
#include "longspan/types.hpp"

namespace longspan::kernels {

/// The keys that a row sees: at most kCount intervals, which ascend and do not touch. Those left
/// over are empty and lie at the end of the last one.
template <int kCount>
struct RowKeys {
  Interval part[kCount];

  LONGSPAN_HD Interval hull() const { return {part[0].begin, part[kCount - 1].end}; }
  LONGSPAN_HD bool contains(std::int64_t key) const { return contains({key, key + 1}); }
  /// Whether the row sees all of `keys`.
  LONGSPAN_HD bool contains(const Interval& keys) const {
    for (const Interval& one : part)
      if (keys.begin >= one.begin && keys.end <= one.end) return true;
    return false;
  }
  /// The part of an interval at or after `from`; empty if there is none.
  LONGSPAN_HD Interval next(std::int64_t from) const {
    for (const Interval& one : part)
      if (!one.empty() && one.end > from) return {one.begin > from ? one.begin : from, one.end};
    return {from, from};
  }
};

/// How what rows see changes from one row to the next.
struct RowOrder {
  /// A row sees one interval, and both ends ascend with the row, those of empty intervals too.
  bool ascends = false;
  /// Besides, no key between what two neighbours see is hidden from both.
  bool touches = false;
};

/// What the rows of one sequence see, by position: its mask, its bidirectional ranges, its
/// documents and its padding. One function says it for all users. Rows that are not used see
/// nothing.
///
/// Ranges add keys, and documents and padding take keys away. A row is within what its mask lets it
/// see, or next to it, and within its range: both together are one interval, whose ends ascend too.
/// A prefix is another interval, before it.
struct MaskRule {
  static constexpr int kIntervals = 2;  // the prefix, and the rest

  Mask mask;  // with the causal flag and the prefix of the sequence
  Documents documents;
  std::int64_t kv_len = 0;     // keys of the sequence, on all ranks
  std::int64_t row_end = 0;    // the position behind the last used row
  std::int64_t first_key = 0;  // keys before it are padding; at most kv_len
  Ranges ranges = {};

  /// The keys that the row at a position sees.
  LONGSPAN_HD RowKeys<kIntervals> operator()(std::int64_t position) const {
    const Interval seen = late(position);
    const Interval nothing{seen.end, seen.end};
    if (mask.prefix == 0) return {{seen, nothing}};
    const Interval before = early(position);
    if (before.empty()) return {{seen, nothing}};
    if (seen.empty()) return {{before, {before.end, before.end}}};
    if (before.end == seen.begin) return {{{before.begin, seen.end}, nothing}};
    return {{before, seen}};
  }

  /// What it sees by the bounds on the left, and by its range. Both ends ascend with the row.
  LONGSPAN_HD Interval late(std::int64_t position) const {
    // The others see an empty interval, at the end of what the last used row sees.
    const bool is_used = position < row_end;
    Interval seen = seen_by_used(is_used ? position : row_end - 1);
    if (!is_used && seen.begin < seen.end) seen.begin = seen.end;
    return seen;
  }
  /// The keys of the prefix before them. Both ends ascend too.
  LONGSPAN_HD Interval early(std::int64_t position) const {
    const bool is_used = position < row_end;
    if (!is_used) position = row_end - 1;
    std::int64_t end = seen_by_used(position).begin;
    if (mask.prefix < end) end = mask.prefix;
    const std::int64_t last = mask.visible(position, kv_len, first_key).end;
    if (last < end) end = last;
    if (end < 0) end = 0;
    return {is_used && first_key < end ? first_key : end, end};
  }

  /// The other way round: the rows, from position 0 on, that see the key at a position.
  RowKeys<kIntervals> rows_that_see(std::int64_t position) const {
    // Padding has no rows, and their place is the first row that sees the key behind it.
    const bool is_padding = position < first_key;
    if (is_padding) position = first_key;
    Interval rows{0, row_end};
    if (mask.causal)
      rows.begin = position;
    else if (mask.right >= 0 && position > mask.right)
      rows.begin = position - mask.right;
    const bool is_kept = position < mask.prefix;  // whatever the bounds on the left say
    if (!is_kept && mask.window > 0 && position + mask.window < row_end)
      rows.end = position + mask.window;
    if (mask.chunk > 0) {
      const std::int64_t past = mask.chunks_of(position, first_key).end;
      const std::int64_t end = past + mask.lookback * mask.chunk;
      if (past - mask.chunk > rows.begin) rows.begin = past - mask.chunk;
      if (!is_kept && end < rows.end) rows.end = end;
    }
    if (ranges) {
      const Interval own = ranges.around(position);
      if (!own.empty() && own.begin < rows.begin) rows.begin = own.begin;
      if (!own.empty() && own.end > rows.end && !mask.clamp_ranges)
        rows.end = own.end < row_end ? own.end : row_end;
    }
    rows = in_document(rows, position);
    if (is_padding) rows.end = rows.begin;
    return {{rows, {rows.end, rows.end}}};
  }

  /// The position of the first of the sequence's `rows` query rows.
  LONGSPAN_HD std::int64_t first_row(std::int64_t rows) const {
    return mask.first_row(rows, kv_len);
  }

  /// The order of rows, or of keys, whose positions ascend. `consecutive`: none is left out between
  /// them.
  LONGSPAN_HD RowOrder order(bool consecutive) const {
    return mask.prefix > 0 ? RowOrder{} : RowOrder{true, consecutive};
  }

 private:
  LONGSPAN_HD Interval seen_by_used(std::int64_t position) const {
    Interval seen = mask.visible(position, kv_len, first_key);
    if (ranges) {
      const Interval own = ranges.around(position);
      if (!own.empty() && own.begin < seen.begin && !mask.clamp_ranges)
        seen.begin = own.begin > 0 ? own.begin : 0;
      if (!own.empty() && own.end > seen.end) seen.end = own.end < kv_len ? own.end : kv_len;
    }
    seen = in_document(seen, position);
    if (seen.begin < first_key) seen.begin = first_key;
    return seen;
  }

  /// The part of `seen` in the document of a position.
  LONGSPAN_HD Interval in_document(Interval seen, std::int64_t position) const {
    if (documents) {
      const Interval own = documents.around(position);
      if (own.begin > seen.begin) seen.begin = own.begin;
      if (own.end < seen.end) seen.end = own.end;
    }
    return seen;
  }
};

/// The local keys of a shard that lie in `keys`, which are positions, and in `among`. The shard is
/// not `listed`.
template <int kCount>
RowKeys<kCount> in_shard(const RowKeys<kCount>& keys, const Shard& shard, std::int64_t kv_len,
                         const Interval& among) {
  const auto cut = [&](std::int64_t position) {
    const std::int64_t key = shard.before(position, kv_len);
    return key < among.begin ? among.begin : key < among.end ? key : among.end;
  };
  RowKeys<kCount> local;
  int last = 0;
  local.part[0] = {cut(keys.part[0].begin), cut(keys.part[0].end)};
  for (int i = 1; i < kCount; ++i) {
    if (keys.part[i].empty()) continue;
    // If the rank holds no keys of one interval, or none between two, fewer are left.
    const Interval next{cut(keys.part[i].begin), cut(keys.part[i].end)};
    if (local.part[last].empty())
      local.part[last] = next;
    else if (!next.empty() && next.begin == local.part[last].end)
      local.part[last].end = next.end;
    else if (!next.empty())
      local.part[++last] = next;
  }
  const std::int64_t end = local.part[last].end;
  while (++last < kCount) local.part[last] = {end, end};
  return local;
}

/// Rows of a rank's share of a sequence's query rows, and what they see of the keys of a shard, as
/// local keys. Neither shard is `listed`.
template <class Rule>
struct ShardedRows {
  Rule rule;
  Shard queries;                // the share of the rows
  std::int64_t whole_rows = 0;  // rows of all ranks
  Shard keys = {};              // by default of one rank: the local keys are the positions
  std::int64_t unused = 0;      // of the whole rows, the last ones

  std::int64_t position(std::int64_t row) const {
    return rule.first_row(whole_rows - unused) + queries.position(row, whole_rows);
  }
  RowKeys<Rule::kIntervals> operator()(std::int64_t row) const {
    return in_shard(rule(position(row)), keys, rule.kv_len, {0, rule.kv_len});
  }
  /// The order of rows [begin, end), at least one.
  RowOrder order(std::int64_t begin, std::int64_t end) const {
    return rule.order(position(end - 1) - position(begin) == end - 1 - begin);
  }
};

/// What a block of rows sees. `RowKeysOf` is a function or an object: RowKeys of a row's index.
template <class RowKeysOf>
class VisibleBlocks {
 public:
  /// Rows [0, rows), at least one.
  LONGSPAN_HD VisibleBlocks(std::int64_t rows, RowKeysOf row_keys, RowOrder order)
      : rows_(rows), row_keys_(row_keys), ascends_(order.ascends) {
    const Interval first = row_keys_(0).hull(), last = row_keys_(rows - 1).hull();
    hull_ = {first.begin, last.end};
    common_ = {last.begin, first.end};
    gapless_ = order.touches || last.begin <= first.end;
    if (!ascends_) look_at_all_rows();
  }

  /// An interval that holds every key that some row sees. It is the smallest one, unless a first or
  /// last row of ascending rows sees nothing.
  LONGSPAN_HD Interval hull() const { return hull_; }

  /// The same of `keys` and of rows [first, last].
  Interval hull(std::int64_t first, std::int64_t last, const Interval& keys) const {
    if (ascends_) {
      const Interval of_first = row_keys_(first).hull(), of_last = row_keys_(last).hull();
      return both(keys, {of_first.begin, of_last.end});
    }
    Interval found{keys.end, keys.begin};
    for (std::int64_t row = first; row <= last; ++row) {
      const auto seen = row_keys_(row);
      for (const Interval& one : seen.part) extend(found, both(keys, one));
    }
    return found.empty() ? Interval{keys.begin, keys.begin} : found;
  }

  /// Whether every row sees all of `keys`.
  bool full(const Interval& keys) const {
    if (keys.begin < common_.begin || keys.end > common_.end) return false;
    if (ascends_) return true;
    for (std::int64_t row = 0; row < rows_; ++row)
      if (!row_keys_(row).contains(keys)) return false;
    return true;
  }

  /// Whether no key is seen by some rows only.
  bool rows_see_alike() const {
    return hull_.begin == common_.begin && hull_.end == common_.end && full(hull_);
  }

  /// The first keys at or after `from` that some row sees: none before the result, and all in it.
  /// Others may follow at its end. Empty if there are none.
  Interval next(std::int64_t from) const {
    if (!ascends_) return next_of_all_rows(from);
    if (gapless_) return both({from, hull_.end}, hull_);
    std::int64_t row = first_row_after(0, from);
    while (row < rows_ && row_keys_(row).hull().empty())
      row = first_row_after(row + 1, row_keys_(row).hull().end);
    if (row == rows_) return {hull_.end, hull_.end};
    Interval found = row_keys_(row).hull();
    // The rows that begin in what is found extend it, up to the first that leaves a gap.
    for (;;) {
      const std::int64_t beyond =
          first_row(row + 1, [&](const Interval& keys) { return keys.begin > found.end; });
      if (beyond == row + 1) break;
      row = beyond - 1;
      found.end = row_keys_(row).hull().end;
    }
    return {found.begin > from ? found.begin : from, found.end};
  }

  /// Whether some row sees a key of `keys`.
  bool sees_some(const Interval& keys) const {
    const Interval found = next(keys.begin);
    return !found.empty() && found.begin < keys.end;
  }

  /// What one row sees.
  auto row(std::int64_t index) const { return row_keys_(index); }

 private:
  static Interval both(const Interval& a, const Interval& b) {
    const std::int64_t begin = a.begin > b.begin ? a.begin : b.begin;
    const std::int64_t end = a.end < b.end ? a.end : b.end;
    return {begin, end > begin ? end : begin};
  }
  LONGSPAN_HD static void extend(Interval& hull, const Interval& by) {
    if (by.empty()) return;
    if (by.begin < hull.begin) hull.begin = by.begin;
    if (by.end > hull.end) hull.end = by.end;
  }

  LONGSPAN_HD void look_at_all_rows() {
    gapless_ = false;
    hull_ = common_ = row_keys_(0).hull();
    for (std::int64_t row = 1; row < rows_; ++row) {
      const Interval keys = row_keys_(row).hull();
      if (hull_.empty()) hull_ = keys;
      extend(hull_, keys);
      if (keys.begin > common_.begin) common_.begin = keys.begin;
      if (keys.end < common_.end) common_.end = keys.end;
    }
  }

  Interval next_of_all_rows(std::int64_t from) const {
    Interval found{hull_.end, hull_.end};
    for (std::int64_t row = 0; row < rows_; ++row) {
      const Interval keys = row_keys_(row).next(from);
      if (keys.empty()) continue;
      if (found.empty() || keys.begin < found.begin)
        found = keys;
      else if (keys.begin == found.begin && keys.end > found.end)
        found.end = keys.end;
    }
    return found;
  }

  /// The first row from `low` on that is `beyond`, as all rows behind it are; rows_ if none is. It
  /// is often near, so steps double.
  template <class Beyond>
  std::int64_t first_row(std::int64_t low, const Beyond& beyond) const {
    std::int64_t high = low;
    for (std::int64_t step = 1; high < rows_ && !beyond(row_keys_(high).hull()); step *= 2) {
      low = high + 1;
      high = low + step < rows_ ? low + step : rows_;
    }
    while (low < high) {
      const std::int64_t middle = low + (high - low) / 2;
      if (beyond(row_keys_(middle).hull()))
        high = middle;
      else
        low = middle + 1;
    }
    return low;
  }
  std::int64_t first_row_after(std::int64_t low, std::int64_t key) const {
    return first_row(low, [&](const Interval& keys) { return keys.end > key; });
  }

  std::int64_t rows_;
  RowKeysOf row_keys_;
  bool ascends_;
  bool gapless_ = false;  // of ascending rows: all keys of the hull are seen
  Interval hull_;         // of the keys that some row sees
  Interval common_;       // the keys that all rows see; in between, some rows may have gaps
};

}  // namespace longspan::kernels
