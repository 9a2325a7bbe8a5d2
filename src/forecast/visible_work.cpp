#include "src/forecast/visible_work.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "kernels/visible.hpp"
#include "src/base/divided_up.hpp"

namespace longspan {
namespace {

constexpr std::int64_t kTile = 128;  // rows, and keys

/// The position behind the last row of all ranks.
std::int64_t row_end(const Mask& mask, const Sequences& s) {
  return mask.first_row(s.rows, s.keys) + s.rows;
}

/// The keys that the row at a position sees.
double seen_by_row(const Mask& mask, const Sequences& s, std::int64_t position) {
  double keys = 0;
  for (const Interval& one : kernels::MaskRule{mask, {}, s.keys, row_end(mask, s)}(position).part)
    if (!one.empty()) keys += static_cast<double>(one.end - one.begin);
  return keys;
}

/// Walks over `count` positions in cells of equal size; the middle of a cell stands for all of
/// them.
template <class Visit>
void for_cells(std::int64_t count, std::int64_t cells, const Visit& visit) {
  cells = std::min(count, cells);
  for (std::int64_t c = 0; c < cells; ++c) {
    const std::int64_t begin = count * c / cells, end = count * (c + 1) / cells;
    visit(begin, end, (begin + end - 1) / 2);
  }
}

constexpr std::int64_t kCells = 4096;  // of a walk over a sequence, or over the tiles of a rank
constexpr std::int64_t kAllCells = 64 * kCells;  // of all ranks that are sampled

/// In a batch of sequences that differ, each gets a part of the cells, but at least this many.
constexpr std::int64_t kLeastCells = 64;

std::int64_t cells_of_each(std::int64_t cells, const std::vector<Sequences>& batch) {
  return std::max(kLeastCells, cells / static_cast<std::int64_t>(batch.size()));
}

/// One rank's part of a sequence, cut into tiles, and what the other side sees of it: for keys the
/// rows, for rows the keys.
class Share {
 public:
  Share(const Shard& own, bool by_keys, const Mask& mask, const Sequences& sequence, int group)
      : own_(own),
        by_keys_(by_keys),
        rule_{mask, {}, sequence.keys, row_end(mask, sequence)},
        first_row_(mask.first_row(sequence.rows, sequence.keys)),
        own_heads_(by_keys ? 1 : group),
        other_heads_(by_keys ? group : 1),
        whole_(by_keys ? sequence.keys : sequence.rows),
        count_(own.local_len(whole_)) {}

  std::int64_t tiles() const { return divided_up(count_ * own_heads_, kTile); }

  /// The number of tiles of the other side that form visible tiles with tile `tile`.
  double visible_with(std::int64_t tile) const {
    const std::int64_t begin = tile * kTile / own_heads_,
                       end = std::min(count_, divided_up((tile + 1) * kTile, own_heads_));
    const bool consecutive = position(end - 1) - position(begin) == end - 1 - begin;
    const kernels::VisibleBlocks others(
        end - begin, [&](std::int64_t i) { return others_of(position(begin + i)); },
        rule_.order(consecutive));
    std::int64_t tiles = 0;
    for (Interval seen = others.next(0); !seen.empty();) {
      const std::int64_t past = divided_up(seen.end, kTile);
      tiles += past - seen.begin / kTile;
      seen = others.next(past * kTile);
    }
    return static_cast<double>(tiles);
  }

 private:
  std::int64_t position(std::int64_t i) const {
    return own_.position(i, whole_) + (by_keys_ ? 0 : first_row_);
  }
  /// The keys that the row at a position sees, or the packed rows that see the key there.
  kernels::RowKeys<kernels::MaskRule::kIntervals> others_of(std::int64_t at) const {
    if (!by_keys_) return rule_(at);
    auto rows = rule_.rows_that_see(at);
    const auto packed = [&](std::int64_t row) {
      return std::max<std::int64_t>(0, row - first_row_) * other_heads_;
    };
    for (Interval& one : rows.part) one = {packed(one.begin), packed(one.end)};
    return rows;
  }

  Shard own_;
  bool by_keys_;
  kernels::MaskRule rule_;
  std::int64_t first_row_;                // position of the first row of all ranks
  std::int64_t own_heads_, other_heads_;  // of a packed row, of a key
  std::int64_t whole_, count_;            // positions of all ranks, and of this one
};

double tiles_of_rank(const Sharding& dealt, bool by_keys, const Mask& mask,
                     const std::vector<Sequences>& batch, int group, int rank, int ranks,
                     std::int64_t cells) {
  double own = 0;
  for (const Sequences& s : batch) {
    const Share share(dealt.resolve(by_keys ? s.keys : s.rows, rank, ranks), by_keys, mask, s,
                      group);
    for_cells(share.tiles(), cells_of_each(cells, batch),
              [&](std::int64_t begin, std::int64_t end, std::int64_t middle) {
                own += s.count * static_cast<double>(end - begin) * share.visible_with(middle);
              });
  }
  return own;
}

}  // namespace

std::vector<Sequences> sequences_of(const RunSize& size, const Mask& mask) {
  constexpr std::size_t kLengths = 256;
  const bool see_nothing = mask.alignment == Alignment::lower_right;  // rows past the keys
  const auto seen = [see_nothing](std::int64_t rows, std::int64_t keys, double count) {
    return Sequences{see_nothing ? std::min(rows, keys) : rows, keys, count};
  };
  if (size.each.empty()) {
    const double count = std::max(1.0, size.sequences);
    return {seen(std::llround(size.tokens / count), std::llround(size.keys / count), count)};
  }
  std::vector<Sequences> all;
  for (const SequenceSize& one : size.each) all.push_back(seen(one.rows, one.keys, 1));
  std::sort(all.begin(), all.end(), [](const Sequences& a, const Sequences& b) {
    return a.keys != b.keys ? a.keys < b.keys : a.rows < b.rows;
  });
  std::vector<Sequences> alike;
  for (const Sequences& one : all) {
    if (!alike.empty() && alike.back().keys == one.keys && alike.back().rows == one.rows)
      ++alike.back().count;
    else
      alike.push_back(one);
  }
  if (alike.size() <= kLengths) return alike;
  std::vector<Sequences> some;
  for (std::size_t i = 0; i < kLengths; ++i) {
    const std::size_t begin = alike.size() * i / kLengths, end = alike.size() * (i + 1) / kLengths;
    Sequences& stands = some.emplace_back(alike[(begin + end - 1) / 2]);
    stands.count = 0;
    for (std::size_t j = begin; j < end; ++j) stands.count += alike[j].count;
  }
  return some;
}

double visible_pairs(const Mask& mask, const std::vector<Sequences>& batch) {
  double pairs = 0;
  for (const Sequences& s : batch)
    for_cells(s.rows, cells_of_each(kCells, batch),
              [&](std::int64_t begin, std::int64_t end, std::int64_t middle) {
                pairs += s.count * static_cast<double>(end - begin) *
                         seen_by_row(mask, s, mask.first_row(s.rows, s.keys) + middle);
              });
  return pairs;
}

double balance_of(const Sharding& dealt, Balanced by, const Mask& mask,
                  const std::vector<Sequences>& batch, int group, int ranks) {
  constexpr int kRanks = 256;
  if (by == Balanced::evenly || ranks == 1 || is_by_table(dealt)) return 1;
  const int looked_at = std::min(ranks, kRanks);
  // With a prefix every row of a tile is asked.
  const std::int64_t cells = std::min(kCells, kAllCells / looked_at) / (mask.prefix > 0 ? 8 : 1);
  double most = 0, sum = 0;
  for (int i = 0; i < looked_at; ++i) {
    const int rank =
        looked_at == 1 ? 0 : static_cast<int>(std::int64_t{ranks - 1} * i / (looked_at - 1));
    const double own =
        tiles_of_rank(dealt, by == Balanced::by_keys, mask, batch, group, rank, ranks, cells);
    most = std::max(most, own);
    sum += own;
  }
  return sum > 0 ? most * looked_at / sum : 1;
}

}  // namespace longspan
