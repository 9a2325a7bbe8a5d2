// What blocks of rows see, against every (row, key): random masks, documents, causal flags and
// shards; a rule of two intervals whose ends do not ascend; and the tiles of host kernels.
#include "kernels/visible.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kernels/host/visible.hpp"
#include "tests/support/fresh_seed.hpp"
#include "tests/support/sees.hpp"

namespace longspan::tests {
namespace {

using kernels::MaskRule;
using kernels::RowKeys;
using kernels::RowOrder;
using kernels::ShardedRows;
using kernels::VisibleBlocks;

using Matrix = std::vector<std::vector<bool>>;  // [rows][keys]: whether the row sees the key

class Random {
 public:
  explicit Random(std::uint32_t seed) : engine_(seed) {}
  /// At least 0, below n; 0 if n is 0.
  std::int64_t below(std::int64_t n) {
    return n <= 0 ? 0 : static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(n));
  }
  bool one_in(std::int64_t n) { return below(n) == 0; }
  std::mt19937_64& engine() { return engine_; }

 private:
  std::mt19937_64 engine_;
};

/// A mask, documents and lengths of one sequence.
struct Drawn {
  Mask mask;
  std::vector<std::int64_t> documents;  // starts, or none
  std::vector<std::int64_t> ranges;     // begins and ends, or none
  std::int64_t kv_len = 0, whole_rows = 0, unused = 0, first_key = 0;

  Drawn(Random& random, std::int64_t most_keys) {
    mask.causal = random.one_in(2);
    if (random.one_in(2)) mask.window = 1 + random.below(random.one_in(2) ? 4 : most_keys);
    if (random.one_in(3)) mask.right = random.below(random.one_in(2) ? 4 : most_keys);
    if (random.one_in(3)) mask.alignment = Alignment::upper_left;
    kv_len = 1 + random.below(most_keys);
    whole_rows = 1 + random.below(random.one_in(4) ? kv_len + 20 : kv_len);
    if (random.one_in(3)) {
      for (std::int64_t d = random.below(5); d >= 0; --d)
        documents.push_back(random.below(kv_len + 1));
      std::sort(documents.begin(), documents.end());
    }
    if (random.one_in(3)) {
      mask.chunk = 1 + random.below(random.one_in(2) ? 4 : most_keys);
      mask.lookback = random.below(3);
    }
    if (random.one_in(3)) {
      for (std::int64_t r = 2 * random.below(4); r > 0; --r)
        ranges.push_back(random.below(kv_len + 1));
      std::sort(ranges.begin(), ranges.end());
      mask.clamp_ranges = random.one_in(2);
    }
    if (documents.empty() && random.one_in(3))
      mask.prefix = random.below(random.one_in(2) ? 4 : most_keys);
    if (random.one_in(3)) unused = random.below(whole_rows + 1);
    if (random.one_in(3)) first_key = random.below(kv_len + 1);
  }
  Documents table() const {
    if (documents.empty()) return {};
    return {documents.data(), std::ssize(documents) - 1};
  }
  Ranges range_table() const {
    if (ranges.empty()) return {};
    return {ranges.data(), std::ssize(ranges) / 2};
  }
  bool in_one_document(std::int64_t i, std::int64_t j) const {
    if (documents.empty()) return true;
    for (std::size_t d = 0; d + 1 < documents.size(); ++d)
      if (i >= documents[d] && i < documents[d + 1])
        return j >= documents[d] && j < documents[d + 1];
    return false;
  }
  bool sees(std::int64_t i, std::int64_t j) const {
    return i < row_end() && j >= first_key && tests::sees(mask, i, j, kv_len, first_key, ranges) &&
           in_one_document(i, j);
  }
  /// The position behind the last used row.
  std::int64_t row_end() const {
    return mask.alignment == Alignment::upper_left ? whole_rows - unused : kv_len;
  }
  MaskRule rule() const { return {mask, table(), kv_len, row_end(), first_key, range_table()}; }
};

/// A rank's share of `length` positions by any rule; `cuts` holds the table of `ranges`.
Shard draw_shard(Random& random, std::int64_t length, std::vector<std::int64_t>& cuts) {
  const int ranks = random.one_in(3) ? 1 : static_cast<int>(1 + random.below(5));
  const int rank = static_cast<int>(random.below(ranks));
  cuts.assign(static_cast<std::size_t>(ranks) + 1, 0);
  for (std::int64_t& cut : cuts) cut = random.below(length + 1);
  cuts.front() = 0;
  cuts.back() = length;
  std::sort(cuts.begin(), cuts.end());
  constexpr Layout kLayouts[] = {Layout::contiguous, Layout::ranges, Layout::zigzag,
                                 Layout::striped, Layout::interleaved};
  const std::int64_t block = random.one_in(2) ? 128 : 1 + random.below(9);
  return {kLayouts[random.below(5)], rank, ranks, length, block, cuts.data()};
}

std::string description(const Interval& i) {
  return "[" + std::to_string(i.begin) + ", " + std::to_string(i.end) + ")";
}

bool some_row_sees(const Matrix& seen, std::int64_t key) {
  return std::any_of(seen.begin(), seen.end(), [&](const std::vector<bool>& row) {
    return row[static_cast<std::size_t>(key)];
  });
}

/// The hull of what rows [first, last] see of `keys`; empty if nothing.
Interval hull_of(const Matrix& seen, std::int64_t first, std::int64_t last, const Interval& keys) {
  Interval hull{keys.end, keys.begin};
  for (std::int64_t row = first; row <= last; ++row)
    for (std::int64_t key = keys.begin; key < keys.end; ++key)
      if (seen[static_cast<std::size_t>(row)][static_cast<std::size_t>(key)]) {
        hull.begin = std::min(hull.begin, key);
        hull.end = std::max(hull.end, key + 1);
      }
  return hull;
}

bool sees_nothing(const std::vector<bool>& row) {
  return std::find(row.begin(), row.end(), true) == row.end();
}

/// Whether an interval holds `inner`, and, if `exactly`, is it.
void expect_hull(const Interval& found, const Interval& inner, bool exactly, const char* what) {
  if (!inner.empty()) {
    EXPECT_TRUE(found.begin <= inner.begin && found.end >= inner.end)
        << what << " " << description(found) << " without some of " << description(inner);
  }
  if (!exactly) return;
  EXPECT_EQ(found.empty(), inner.empty()) << what << " " << description(found);
  if (!inner.empty()) {
    EXPECT_TRUE(found.begin == inner.begin && found.end == inner.end)
        << what << " " << description(found) << " is not " << description(inner);
  }
}

template <class Rows>
void expect_matrix(const VisibleBlocks<Rows>& blocks, const Matrix& seen, bool ascends,
                   Random& random) {
  const std::int64_t rows = std::ssize(seen), keys = std::ssize(seen.front());
  const auto ends_see = [&](std::int64_t first, std::int64_t last) {
    return !sees_nothing(seen[static_cast<std::size_t>(first)]) &&
           !sees_nothing(seen[static_cast<std::size_t>(last)]);
  };
  expect_hull(blocks.hull(), hull_of(seen, 0, rows - 1, {0, keys}),
              !ascends || ends_see(0, rows - 1), "hull");
  for (std::int64_t row = 0; row < rows; ++row)
    for (std::int64_t key = 0; key < keys; ++key)
      EXPECT_EQ(blocks.row(row).contains(key),
                seen[static_cast<std::size_t>(row)][static_cast<std::size_t>(key)])
          << "row " << row << " key " << key;
  for (std::int64_t from = 0; from <= keys; ++from) {
    std::int64_t first = from;
    while (first < keys && !some_row_sees(seen, first)) ++first;
    const Interval found = blocks.next(from);
    EXPECT_EQ(found.empty(), first == keys) << "next(" << from << ") " << description(found);
    if (found.empty() || first == keys) continue;
    EXPECT_EQ(found.begin, first) << "next(" << from << ")";
    EXPECT_LE(found.end, keys);
    for (std::int64_t key = found.begin; key < std::min(found.end, keys); ++key)
      EXPECT_TRUE(some_row_sees(seen, key)) << "next(" << from << ") has " << key;
  }
  bool alike = true;
  for (const std::vector<bool>& row : seen) alike = alike && row == seen.front();
  if (blocks.rows_see_alike()) {
    EXPECT_TRUE(alike);
  }
  for (int turn = 0; turn < 20; ++turn) {
    Interval some;
    some.begin = random.below(keys);
    some.end = some.begin + 1 + random.below(random.one_in(2) ? 3 : keys - some.begin);
    some.end = std::min(some.end, keys);
    bool full = true, any = false;
    for (std::int64_t key = some.begin; key < some.end; ++key) {
      any = any || some_row_sees(seen, key);
      for (const std::vector<bool>& row : seen) full = full && row[static_cast<std::size_t>(key)];
    }
    EXPECT_EQ(blocks.full(some), full) << "full " << description(some);
    EXPECT_EQ(blocks.sees_some(some), any) << "sees_some " << description(some);
    const std::int64_t first = random.below(rows), last = first + random.below(rows - first);
    // The hull of rows [first, last], cut to `some`.
    Interval inner = hull_of(seen, first, last, ascends ? Interval{0, keys} : some);
    inner = {std::max(inner.begin, some.begin), std::min(inner.end, some.end)};
    expect_hull(blocks.hull(first, last, some), inner, !ascends || ends_see(first, last),
                "hull of rows");
  }
}

/// The rows of a share and the local keys of another one, by `sees(position, position)`.
template <class Rule, class Sees>
Matrix matrix_of(const ShardedRows<Rule>& rows, std::int64_t begin, std::int64_t end,
                 const Sees& sees) {
  const std::int64_t kv_len = rows.rule.kv_len;
  Matrix matrix;
  for (std::int64_t row = begin; row < end; ++row) {
    std::vector<bool>& seen = matrix.emplace_back();
    for (std::int64_t key = 0; key < rows.keys.local_len(kv_len); ++key)
      seen.push_back(sees(rows.position(row), rows.keys.position(key, kv_len)));
  }
  return matrix;
}

TEST(Visible, BlocksOfAMaskAreWhatTheDefinitionSays) {
  const std::uint32_t seed = fresh_seed();
  Random random(seed);
  for (int turn = 0; turn < 4000 && !HasFailure(); ++turn) {
    const Drawn drawn(random, 40);
    std::vector<std::int64_t> row_cuts, key_cuts;
    const Shard queries = draw_shard(random, drawn.whole_rows, row_cuts);
    const Shard keys = draw_shard(random, drawn.kv_len, key_cuts);
    const std::int64_t own = queries.local_len(drawn.whole_rows);
    if (own == 0 || keys.local_len(drawn.kv_len) == 0) continue;
    const std::int64_t begin = random.below(own), end = begin + 1 + random.below(own - begin);
    SCOPED_TRACE("seed " + std::to_string(seed) + " turn " + std::to_string(turn) + " causal " +
                 std::to_string(drawn.mask.causal) + " window " +
                 std::to_string(drawn.mask.window) + " right " + std::to_string(drawn.mask.right) +
                 " chunk " + std::to_string(drawn.mask.chunk) + " prefix " +
                 std::to_string(drawn.mask.prefix) + " ranges " +
                 std::to_string(drawn.ranges.size()) + " documents " +
                 std::to_string(drawn.documents.size()) + " rows " + name(queries.layout) +
                 " keys " + name(keys.layout));
    const ShardedRows<MaskRule> rows{drawn.rule(), queries, drawn.whole_rows, keys, drawn.unused};
    const Matrix seen = matrix_of(rows, begin, end,
                                  [&](std::int64_t i, std::int64_t j) { return drawn.sees(i, j); });
    const auto row_keys = [&](std::int64_t row) { return rows(begin + row); };
    const RowOrder order = rows.order(begin, end);
    EXPECT_EQ(order.ascends, drawn.mask.prefix == 0);
    expect_matrix(VisibleBlocks(end - begin, row_keys, order), seen, order.ascends, random);
    // A rule that promises nothing gets the same answers.
    expect_matrix(VisibleBlocks(end - begin, row_keys, RowOrder{}), seen, false, random);
  }
}

/// What CUDA kernels take in place of two intervals: each ascends, and no key is in both.
TEST(Visible, ThePrefixAndTheRest) {
  Random random(fresh_seed());
  int both = 0;
  for (int turn = 0; turn < 1000 && !HasFailure(); ++turn) {
    const Drawn drawn(random, 40);
    if (drawn.row_end() == 0) continue;
    const MaskRule rule = drawn.rule();
    Interval early_before, late_before;
    for (std::int64_t row = drawn.kv_len - drawn.whole_rows; row < drawn.kv_len + 9; ++row) {
      const Interval early = rule.early(row), late = rule.late(row);
      for (std::int64_t key = 0; key < drawn.kv_len; ++key)
        EXPECT_EQ(int{early.contains(key)} + int{late.contains(key)}, int{drawn.sees(row, key)})
            << "row " << row << " key " << key;
      both += early.empty() || late.empty() ? 0 : 1;
      if (row > drawn.kv_len - drawn.whole_rows) {
        EXPECT_TRUE(early_before.begin <= early.begin && early_before.end <= early.end) << row;
        EXPECT_TRUE(late_before.begin <= late.begin && late_before.end <= late.end) << row;
      }
      early_before = early, late_before = late;
    }
  }
  EXPECT_GT(both, 100);
}

/// A key's rows are those that see it, and they ascend with the key.
TEST(Visible, RowsThatSeeAKey) {
  Random random(fresh_seed());
  for (int turn = 0; turn < 1000 && !HasFailure(); ++turn) {
    const Drawn drawn(random, 30);
    if (drawn.row_end() == 0) continue;
    Matrix seen(static_cast<std::size_t>(drawn.kv_len));
    for (std::int64_t key = 0; key < drawn.kv_len; ++key)
      for (std::int64_t row = 0; row < drawn.row_end(); ++row)
        seen[static_cast<std::size_t>(key)].push_back(drawn.sees(row, key));
    const MaskRule rule = drawn.rule();
    const auto rows_of = [&](std::int64_t key) { return rule.rows_that_see(key); };
    const RowOrder order = rule.order(true);
    expect_matrix(VisibleBlocks(drawn.kv_len, rows_of, order), seen, order.ascends, random);
  }
}

/// Two intervals for each position, in any order from one position to the next.
struct TwoIntervals {
  static constexpr int kIntervals = 2;

  std::vector<RowKeys<2>> of;  // [positions]
  std::int64_t kv_len = 0;

  TwoIntervals(Random& random, std::int64_t positions) : kv_len(positions) {
    for (std::int64_t i = 0; i < positions; ++i) {
      std::int64_t ends[4];
      for (std::int64_t& end : ends) end = random.below(positions + 1);
      std::sort(std::begin(ends), std::end(ends));
      RowKeys<2> keys{{{ends[0], ends[1]}, {ends[2], ends[3]}}};
      if (random.one_in(5)) keys.part[0].end = keys.part[0].begin;  // one, or nothing
      if (keys.part[0].end == keys.part[1].begin || keys.part[0].empty()) {
        if (keys.part[0].empty()) keys.part[0].begin = keys.part[1].begin;
        keys.part[0].end = keys.part[1].end;
        keys.part[1].begin = keys.part[1].end;
      }
      if (keys.part[1].empty()) keys.part[1] = {keys.part[0].end, keys.part[0].end};
      of.push_back(keys);
    }
  }
  RowKeys<2> operator()(std::int64_t position) const {
    return of[static_cast<std::size_t>(position)];
  }
  std::int64_t first_row(std::int64_t rows) const { return kv_len - rows; }
  static RowOrder order(bool) { return {}; }
};

TEST(Visible, TwoIntervalsInAnyOrder) {
  const std::uint32_t seed = fresh_seed();
  Random random(seed);
  int with_gaps = 0;
  for (int turn = 0; turn < 2000 && !HasFailure(); ++turn) {
    const std::int64_t length = 1 + random.below(30);
    std::vector<std::int64_t> row_cuts, key_cuts;
    const Shard queries = draw_shard(random, length, row_cuts);
    const Shard keys = draw_shard(random, length, key_cuts);
    const std::int64_t own = queries.local_len(length);
    if (own == 0 || keys.local_len(length) == 0) continue;
    const std::int64_t begin = random.below(own), end = begin + 1 + random.below(own - begin);
    SCOPED_TRACE("seed " + std::to_string(seed) + " turn " + std::to_string(turn) + " rows " +
                 name(queries.layout) + " keys " + name(keys.layout));
    const ShardedRows<TwoIntervals> rows{TwoIntervals(random, length), queries, length, keys};
    const auto sees = [&](std::int64_t i, std::int64_t j) {
      const RowKeys<2> seen = rows.rule(i);
      return seen.part[0].contains(j) || seen.part[1].contains(j);
    };
    const VisibleBlocks blocks(
        end - begin, [&](std::int64_t row) { return rows(begin + row); }, rows.order(begin, end));
    expect_matrix(blocks, matrix_of(rows, begin, end, sees), false, random);
    for (std::int64_t row = begin; row < end; ++row) {
      const RowKeys<2> local = rows(row);
      if (local.part[1].empty()) continue;
      ++with_gaps;
      EXPECT_FALSE(local.part[0].empty());
      EXPECT_LT(local.part[0].end, local.part[1].begin);
    }
  }
  EXPECT_GT(with_gaps, 100);
}

TEST(Visible, KeysBetweenTwoIntervalsAreHidden) {
  Random random(fresh_seed());
  for (int turn = 0; turn < 500 && !HasFailure(); ++turn) {
    const TwoIntervals rule(random, 400);
    const RowKeys<2> seen = rule(random.below(400));
    const kernels::host::Segment segment{random.below(300),
                                         static_cast<int>(1 + random.below(128))};
    kernels::host::Range range;
    range.begin = static_cast<int>(random.below(128));
    range.end = range.begin + static_cast<int>(random.below(129 - range.begin));
    std::vector<float> scores(128, 1.0f);
    kernels::host::hide_unseen(seen, segment, range, scores.data());
    for (int j = 0; j < 128; ++j) {
      const bool hidden = j >= range.begin && j < range.end &&
                          (j >= segment.keys || !seen.contains(segment.first + j));
      EXPECT_EQ(std::isinf(scores[static_cast<std::size_t>(j)]), hidden) << j;
    }
  }
}

/// A tile of a host kernel, and what its rows see.
class HostTile {
 public:
  HostTile(Random& random, const Drawn& drawn)
      : drawn_(drawn),
        used_(static_cast<std::int32_t>(drawn.whole_rows - drawn.unused)),
        padding_(static_cast<std::int32_t>(drawn.first_key)) {
    g_.kv_heads = 2;
    g_.heads = static_cast<int>(2 * (1 + random.below(3)));
    g_.mask = drawn.mask;
    g_.documents = drawn.table();
    g_.ranges = drawn.range_table();
    if (drawn.unused > 0) g_.batch.used_rows = &used_;
    if (drawn.first_key > 0) g_.batch.left_padding = &padding_;
    if (random.one_in(3)) {
      flag_ = drawn.mask.causal ? 1 : 0;
      g_.mask.causal = !drawn.mask.causal;
      g_.batch.causal = &flag_;
    }
    g_.shard = draw_shard(random, drawn.kv_len, key_cuts_);
    if (random.one_in(4)) list_keys(random);
    Shard queries = draw_shard(random, drawn.whole_rows, row_cuts_);
    if (queries.ranks > 1) g_.queries = queries;
    g_.tokens = g_.queries.ranks > 1 ? queries.local_len(drawn.whole_rows) : drawn.whole_rows;
    g_.queries.length = drawn.whole_rows;
  }
  const kernels::Geometry& geometry() const { return g_; }
  kernels::host::Tile draw(Random& random) const {
    const kernels::host::Sequence s(g_, 0);
    const std::int64_t rows = g_.tokens * group(), first = random.below(rows);
    kernels::host::Tile tile{
        s,
        0,
        1,
        first,
        static_cast<int>(1 + random.below(std::min<std::int64_t>(rows - first, 384))),
        0,
        s.order.leaves,
        {0, s.keys}};
    if (random.one_in(3)) {
      tile.keys.begin = random.below(s.keys + 1);
      tile.keys.end = tile.keys.begin + random.below(s.keys + 1 - tile.keys.begin);
    }
    return tile;
  }
  bool sees(const kernels::host::Tile& tile, int row, std::int64_t key) const {
    if (!tile.keys.contains(key)) return false;
    const std::int64_t position = g_.query_position(0, (tile.first + row) / group(), drawn_.kv_len);
    return drawn_.sees(position, tile.sequence.shard.position(key, drawn_.kv_len));
  }
  bool has_keys() const { return g_.tokens > 0 && g_.shard.local_len(drawn_.kv_len) > 0; }

 private:
  std::int64_t group() const { return g_.heads / g_.kv_heads; }
  void list_keys(Random& random) {
    listed_.resize(static_cast<std::size_t>(drawn_.kv_len));
    std::iota(listed_.begin(), listed_.end(), 0);
    std::shuffle(listed_.begin(), listed_.end(), random.engine());
    g_.shard =
        Shard::at_positions(drawn_.kv_len, 0, 2, listed_.data(), 1 + random.below(drawn_.kv_len));
  }

  const Drawn& drawn_;
  std::int32_t used_, padding_;
  kernels::Geometry g_;
  std::uint8_t flag_ = 0;
  std::vector<std::int64_t> key_cuts_, row_cuts_, listed_;
};

/// Each segment of a tile: that it is visited if a row sees some of it, what is loaded, and the
/// scores that are hidden.
TEST(Visible, TilesOfTheHostVisitAndHideWhatTheDefinitionSays) {
  using namespace kernels::host;
  const std::uint32_t seed = fresh_seed();
  Random random(seed);
  int skipped = 0;
  for (int turn = 0; turn < 500 && !HasFailure(); ++turn) {
    const Drawn drawn(random, 900);
    const HostTile host(random, drawn);
    if (!host.has_keys()) continue;
    const Tile tile = host.draw(random);
    const VisibleRows<kTileRows> visible(host.geometry(), tile);
    SCOPED_TRACE("seed " + std::to_string(seed) + " turn " + std::to_string(turn) + " keys " +
                 name(tile.sequence.shard.layout) + " rows " + std::to_string(tile.rows));
    std::vector<bool> visited(static_cast<std::size_t>(segments_of(tile.sequence.keys)));
    visible.for_each_segment([&](std::uint64_t, const Segment& segment) {
      EXPECT_FALSE(visited[static_cast<std::size_t>(segment.first / kSegment)]);
      visited[static_cast<std::size_t>(segment.first / kSegment)] = true;
    });
    for (std::int64_t first = 0; first < tile.sequence.keys; first += kSegment) {
      const Segment segment{
          first, static_cast<int>(std::min<std::int64_t>(kSegment, tile.sequence.keys - first))};
      std::vector<bool> any(kSegment);
      for (int row = 0; row < tile.rows; ++row) {
        Range own{kSegment, 0};
        std::vector<float> scores(kSegment, 1.0f);
        visible.hide(segment, row, {0, kSegment}, scores.data());
        for (int j = 0; j < kSegment; ++j) {
          const bool sees = j < segment.keys && host.sees(tile, row, first + j);
          EXPECT_EQ(std::isinf(scores[static_cast<std::size_t>(j)]), !sees)
              << "row " << row << " key " << first + j;
          if (!sees) continue;
          any[static_cast<std::size_t>(j)] = true;
          own = {std::min(own.begin, j), j + 1};
        }
        const Range found = visible.keys(segment, row, row);
        if (own.begin < own.end) {
          EXPECT_TRUE(found.begin <= own.begin && found.end >= own.end);
        }
        if (visible.sees_intervals() && own.begin < own.end) {
          EXPECT_TRUE(found.begin == own.begin && found.end == own.end);
        }
      }
      const bool some = std::find(any.begin(), any.end(), true) != any.end();
      const bool is_visited = visited[static_cast<std::size_t>(first / kSegment)];
      if (some || !visible.listed()) {
        EXPECT_EQ(is_visited, some) << "segment at " << first;
      }
      if (!visible.listed()) {
        EXPECT_EQ(visible.some_row_sees(segment), some);
      }
      if (visible.listed())
        for (int j = 0; j < segment.keys; ++j)
          if (tile.keys.contains(first + j)) {
            EXPECT_EQ(visible.some_row_sees(first + j), any[static_cast<std::size_t>(j)]);
          }
      if (!some && visible.hull().begin < first && visible.hull().end > first + segment.keys)
        ++skipped;
    }
  }
  EXPECT_GT(skipped, 0) << "no tile has a gap between what its rows see";
}

}  // namespace
}  // namespace longspan::tests
