// Attends one tile, in vectors. Each segment of 128 keys is folded from scratch,
//
//     s = score(Q K^T),   m = max s,   p = exp2(s - m),   l = sum p,   o = P V
//
// into a state per row, and the states fold in the fixed order. A row has the same bits in every
// tile: its products are chains (multiply-inl.hpp), its sum of weights has a shape of 16 lanes over
// the whole segment, and keys that it does not see add exact zeros, or nothing. After packing, the
// storage of keys and values (pages, layout, type) does not matter.
#include "kernels/host/targets.hpp"
// Highway compiles the rest of this file once for each target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/attend_tile.cpp"
#include "hwy/foreach_target.h"  // first
//
#include <algorithm>
#include <optional>

#include "hwy/highway.h"
#include "kernels/host/bias-inl.hpp"
#include "kernels/host/dropout-inl.hpp"
#include "kernels/host/few_rows-inl.hpp"
#include "kernels/host/fold_stack.hpp"
#include "kernels/host/key_rows.hpp"
#include "kernels/host/multiply-inl.hpp"
#include "kernels/host/pack-inl.hpp"
#include "kernels/host/row_lanes-inl.hpp"
#include "kernels/host/simd-inl.hpp"
#include "kernels/host/tile.hpp"
#include "kernels/host/visible.hpp"

HWY_BEFORE_NAMESPACE();
namespace longspan::kernels::host {
namespace HWY_NAMESPACE {

/// Turns the scores of kRows rows, 128 apart, into their weights, in place, and writes their max
/// and sum. `keys` is aligned to 16. A row waits only for its own max, so several rows at once hide
/// that latency.
template <int kRows>
HWY_INLINE void weigh(float* scores, Range keys, Stats* stats) {
  const Lanes d;
  Vec top[kRows], shift[kRows], sums[kRows][kLaneSums];
  for (Vec& t : top) t = hn::Set(d, -infinity());
  for (int j = keys.begin; j < keys.end; j += kLanes)
    for (int r = 0; r < kRows; ++r)
      top[r] = hn::Max(top[r], hn::Load(d, scores + r * kSegment + j));
  for (int r = 0; r < kRows; ++r) {
    const float max = stats[r].max = hn::GetLane(hn::MaxOfLanes(d, top[r]));
    // If no key is visible, the weights are exp2(-inf) = 0. A NaN, whether Max keeps it or not,
    // stays in its weight.
    shift[r] = hn::Set(d, max == -infinity() ? 0.0f : max);
    for (Vec& sum : sums[r]) sum = hn::Zero(d);
  }
  for (int j = keys.begin; j < keys.end; j += 16) {
    for (int i = 0; i < kLaneSums; ++i) {
      for (int r = 0; r < kRows; ++r) {
        float* score = scores + r * kSegment + j + i * kLanes;
        const Vec weight = exp2(hn::Sub(hn::Load(d, score), shift[r]));
        hn::Store(weight, d, score);
        sums[r][i] = hn::Add(sums[r][i], weight);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) stats[r].sum = sum_lanes(sums[r]);
}

/// Computes the same as multiply, but skips keys of weight 0. NaN or infinity in the values of a
/// key that this row does not see (but another row of the tile does) then does not reach it.
void multiply_seen(const float* weights, const float* v, Range keys, float* o, int columns) {
  const Lanes d;
  for (int c = 0; c < columns; c += kLanes) {
    const float* column = v + c / kPanel * kSegment * kPanel + c % kPanel;
    Vec sum = hn::Zero(d);
    for (int j = keys.begin; j < keys.end; ++j)
      if (weights[j] != 0.0f)
        sum = hn::MulAdd(hn::Set(d, weights[j]), hn::LoadU(d, column + j * kPanel), sum);
    hn::StoreU(sum, d, o + c);
  }
}

void fold_states(Stats* a_stats, float* a, const Stats* b_stats, const float* b, int rows,
                 int padded) {
  for (int r = 0; r < rows; ++r) {
    const Fold f = fold(a_stats[r], b_stats[r]);
    a_stats[r] = f.stats;
    fold_row(f, a + r * padded, b + r * padded, padded);
  }
}

void pack_segment(const AttendParams& p, const KeyRows& rows, Range keys, float* segment) {
  pack_any_keys(p, rows, aligned(keys), segment);
  pack_any_values(p, rows, keys, segment + TileSpace::key_floats(p));
}

class TileRun {
 public:
  TileRun(const AttendParams& params, const Tile& tile, const PackedSegments& packed,
          const TileSpace& space)
      : p_(params),
        tile_(tile),
        packed_(packed),
        space_(space),
        visible_(params, tile),
        bias_(params, tile),
        dropout_(params, tile),
        padded_(TileSpace::padded(params.value_dim)),
        blocks_((tile.rows + kBlockRows - 1) / kBlockRows),
        few_(kHasFewRows && tile.rows <= kFewRows && reads_in_place(params)),
        in_lanes_(kHasFewRows && !few_ && !packed &&
                  tile.rows <= (kWeighsRows ? kLaneRows : kLaneRows / 2)) {}

  void operator()() {
    if (in_lanes_) std::fill_n(space_.q, TileSpace::whole_lanes(tile_.rows) * p_.head_dim, 0.0f);
    for (int head = 0; head < tile_.kv_heads; ++head) pack_queries(head);
    FoldStack stack;
    const auto merge = [this](int a, int b) {
      fold_states(stats(a), o(a, 0), stats(b), o(b, 0), tile_.states(), padded_);
    };
    // A segment is processed when the next one is known, which it prefetches.
    std::optional<Segment> segment;
    int level = 0;
    visible_.for_each_segment([&](std::uint64_t index, const Segment& next) {
      if (segment) attend_segment(*segment, level, &next);
      level = stack.push(index, merge);
      segment = next;
    });
    if (segment) attend_segment(*segment, level, nullptr);
    if (stack.finish(merge)) return;
    std::fill_n(stats(0), tile_.states(), empty_stats());
    std::fill_n(o(0, 0), tile_.states() * padded_, 0.0f);
  }

 private:
  // Row r of head h has index h * rows + r among the states of a level, and in q.
  Stats* stats(int level) const { return space_.stats + level * space_.rows; }
  float* o(int level, int place) const {
    return space_.o + (std::int64_t{level} * space_.rows + place) * padded_;
  }
  float* scores(int place) const { return space_.scores + place * kSegment; }
  int rows_of(int block) const { return std::min(kBlockRows, tile_.rows - block * kBlockRows); }

  void pack_queries(int head) {
    const int group = p_.heads / p_.kv_heads, kv_head = tile_.kv_head + head;
    const float scale = p_.scale(tile_.sequence.index, kv_head);
    const float factor = p_.score.softcap == 0.0f ? scale * kLog2E : scale / p_.score.softcap;
    with_type(p_.q_dtype, [&]<class T>(const T*) {
      for (int r = 0; r < tile_.rows; ++r) {
        const std::int64_t row = tile_.first + r;
        const T* q =
            p_.q.at<T>(tile_.sequence.first_row + row / group, kv_head * group + row % group);
        if (in_lanes_)
          pack_lane(q, factor, r);
        else
          pack_query(q, factor, p_.head_dim, q_of(head) + r * p_.head_dim);
      }
    });
  }
  template <class T>
  void pack_lane(const T* q, float factor, int r) {
    HWY_ALIGN float row[kMaxHeadDim];
    pack_query(q, factor, p_.head_dim, row);
    float* const to = space_.q + std::int64_t{r / kLanes * kLanes} * p_.head_dim + r % kLanes;
    for (int c = 0; c < p_.head_dim; ++c) to[c * kLanes] = row[c];
  }
  float* q_of(int head) const { return space_.q + head * tile_.rows * p_.head_dim; }

  /// The keys of a segment that some row sees, and those that each block of rows sees.
  Range see(const Segment& segment) {
    Range any{kSegment, 0};
    for (int block = 0; block < blocks_; ++block) {
      const int row = block * kBlockRows;
      const Range keys = seen_[block] = visible_.keys(segment, row, row + rows_of(block) - 1);
      if (keys.begin == keys.end) continue;
      any = {std::min(any.begin, keys.begin), std::max(any.end, keys.end)};
    }
    return any;
  }

  /// Finds the keys that some row sees, and `ahead` more.
  void find(const Segment& segment, int head, Range any, int ahead) {
    find_seen(p_, tile_, visible_, tile_.kv_head + head, segment, any, ahead, rows_);
  }

  /// Finds the packed keys and values of a segment, or packs them.
  void pack(const Segment& segment, int head, Range any, int ahead) {
    if (packed_) {
      k_ = packed_.at<float>(segment.first);
    } else {
      find(segment, head, any, ahead);
      HWY_NAMESPACE::pack_segment(p_, rows_, any, space_.segment);
      k_ = space_.segment;
    }
    v_ = k_ + TileSpace::key_floats(p_);
  }

  /// Writes the states of one segment to `level`.
  void attend_segment(const Segment& segment, int level, const Segment* next) {
    const Range any = see(segment);
    if (p_.bias) bias_.start(segment);
    if (p_.dropout) dropout_.start(segment);
    if (in_lanes_) {
      pack_in_lanes(segment, any, next);
      const int lines = lines_ahead(aligned(any));
      score_row_lanes(k_, aligned(any), p_.head_dim, space_.q, tile_.rows, scores(0), rows_ahead_,
                      lines);
      std::fill_n(seen_, blocks_, any);  // by all rows, since all are computed together
      weigh_rows(segment, level, 0);
      weigh_values_in_lanes(any, level, lines);
      return finish_rows(segment, any, level, 0);
    }
    if (!few_) {
      pack(segment, 0, any, kRowsAhead);
      ahead_ = packed_ && next != nullptr
                   ? LinesAhead(packed_.at<std::byte>(next->first), packed_.bytes)
                   : LinesAhead();
      // Spread over every product: of two panels of keys and of those of values.
      lines_ = ahead_.count() / ((2 + TileSpace::panels(p_.value_dim)) * blocks_) + 1;
      multiply_queries_keys();
      weigh_rows(segment, level, 0);
      multiply_weights_values(level);
      return finish_rows(segment, any, level, 0);
    }
    attend_few(segment, any, level, next);
  }

  /// Packs keys as values are, and values unless they are the first columns of their keys. The rows
  /// of the next segment are prefetched meanwhile.
  void pack_in_lanes(const Segment& segment, Range any, const Segment* next) {
    if (!found_) find(segment, 0, any, kRowsAhead);
    bool in_keys = p_.value_dim % 16 == 0;
    for (int j = any.begin; j < any.end; ++j) in_keys &= rows_.k()[j] == rows_.v()[j];
    float* const keys = space_.segment;
    float* const values =
        in_keys ? keys : keys + kSegment * TileSpace::panels(p_.head_dim) * kPanel;
    pack_keys_as_values(p_, rows_, aligned(any), keys);
    if (!in_keys) pack_any_values(p_, rows_, any, values);
    k_ = keys;
    v_ = values;
    found_ = next != nullptr;
    rows_ahead_.clear();
    if (!found_) return;
    find(*next, 0, see(*next), kRowsAhead);
    see(segment);
    const StorageFormat format = storage_of(p_.kv_dtype);
    rows_ahead_.start(rows_, format.row_bytes(p_.head_dim), format.row_bytes(p_.value_dim));
  }

  /// The same for few rows of all heads. Keys, and then values, are read a few at a time, one head
  /// after another, which is their order in memory if heads are adjacent.
  void attend_few(const Segment& segment, Range any, int level, const Segment* next) {
    if (!found_) find(segment, 0, any, 0);
    std::copy_n(rows_.k(), kSegment, order_);
    std::copy_n(rows_.v(), kSegment, order_ + kSegment);
    found_ = next != nullptr;
    if (found_)
      find(*next, 0, see(*next), 0);
    else
      rows_.clear();
    std::copy_n(rows_.k(), kSegment, order_ + 2 * kSegment);
    std::fill_n(seen_, blocks_, any);  // by all rows, since all are computed together

    for_few_keys(aligned(any), 0, p_.k.head_stride, p_.head_dim,
                 [&](int head, int j, const FewKeys& keys) {
                   score_few(p_.kv_dtype, keys, p_.head_dim, q_of(head), tile_.rows,
                             scores(head * tile_.rows) + j);
                 });
    for (int head = 0; head < tile_.kv_heads; ++head) weigh_rows(segment, level, head);
    std::fill_n(o(level, 0), tile_.states() * padded_, 0.0f);
    for_few_keys(any, kSegment, p_.v.head_stride, p_.value_dim,
                 [&](int head, int j, const FewKeys& values) {
                   weigh_few(p_.kv_dtype, values, p_.value_dim, scores(head * tile_.rows) + j,
                             tile_.rows, o(level, head * tile_.rows), padded_);
                 });
    for (int head = 0; head < tile_.kv_heads; ++head) finish_rows(segment, any, level, head);
  }

  /// Calls visit(head, j, rows j, j + 1 ...) for stretches of `keys`, whose rows are order_ from
  /// `first` on. The rows after them are prefetched. They may have another dim or stride; then some
  /// prefetched lines are the wrong ones.
  template <class Visit>
  void for_few_keys(Range keys, int first, std::int64_t head_stride, int dim, Visit&& visit) {
    constexpr std::int64_t kAhead = 16 << 10, kMost = 32 << 10;  // bytes
    const StorageFormat format = storage_of(p_.kv_dtype);
    const std::int64_t of_key = tile_.kv_heads * format.row_bytes(dim);
    const int stretch = tile_.kv_heads == 1 || kFewKeys * of_key <= kMost ? kFewKeys : 16;
    const int ahead = static_cast<int>(
        std::clamp<std::int64_t>(kAhead / (stretch * of_key) * stretch, stretch, kSegment));
    FewKeys few;
    for (int j = keys.begin; j < keys.end; j += stretch) {
      few.count = std::min(stretch, keys.end - j);
      for (int head = 0; head < tile_.kv_heads; ++head) {
        const std::int64_t of_head = format.bytes(head * head_stride);
        const auto row = [&](int i) {
          const std::byte* of_first = order_[std::min(first + j + i, 3 * kSegment - 1)];
          return of_first ? of_first + of_head : reinterpret_cast<const std::byte*>(kZeros);
        };
        for (int i = 0; i < few.count; ++i) {
          few.rows[i] = row(i);
          few.ahead[i] = row(i + ahead);
        }
        visit(head, j, few);
      }
    }
  }

  /// Turns the scores of a head's rows into weights.
  void weigh_rows(const Segment& segment, int level, int head) {
    for (int block = 0; block < blocks_; ++block) {
      const Range keys = aligned(seen_[block]);
      const int first = block * kBlockRows, rows = rows_of(block);
      for (int r = first; r < first + rows; ++r) {
        float* const of_row = scores(head * tile_.rows + r);
        if (p_.score.softcap != 0.0f) cap(of_row, keys, p_.score.softcap);
        if (p_.bias) bias_.add(tile_.kv_head + head, r, keys, of_row);
        visible_.hide(segment, r, keys, of_row);
      }
      const int place = head * tile_.rows + first;
      with_rows<kBlockRows>(
          rows, [&]<int kRows>() { weigh<kRows>(scores(place), keys, stats(level) + place); });
      if (!p_.dropout) continue;
      for (int r = 0; r < rows; ++r)  // after the sums, which have all weights
        dropout_.drop(tile_.kv_head + head, first + r, keys, scores(place + r));
    }
  }

  // Panels are the outer loop and blocks of rows the inner one, so that a panel stays in the L1
  // cache.

  void multiply_queries_keys() {
    for (int panel = 0; panel < kSegment; panel += kPanel) {
      for (int block = 0; block < blocks_; ++block) {
        const Range keys = aligned(seen_[block]);
        const int begin = std::max(keys.begin, panel), end = std::min(keys.end, panel + kPanel);
        if (begin >= end) continue;
        const int row = block * kBlockRows;
        const float* k = k_ + panel * p_.head_dim + begin - panel;
        multiply({space_.q + row * p_.head_dim, p_.head_dim}, {k, kPanel}, p_.head_dim,
                 scores(row) + begin, kSegment, rows_of(block), end - begin);
        ahead_.next(lines_);
      }
    }
  }

  /// The lines of the next segment's rows to prefetch in each step of the products of rows in
  /// lanes: four columns of keys, or eight keys of values, of 16 rows.
  int lines_ahead(Range keys) const {
    const std::int64_t vectors = (tile_.rows + kLanes - 1) / kLanes, count = keys.end - keys.begin;
    std::int64_t steps = vectors * (count / kLanes) * ((p_.head_dim + 3) / 4);
    steps += wide_rows() / kWeighedRows * (padded_ / kLanes) * ((count + 7) / 8);
    return steps > 0 ? static_cast<int>((rows_ahead_.lines() + steps - 1) / steps) : 0;
  }
  int wide_rows() const { return kWeighsRows ? tile_.rows / kWeighedRows * kWeighedRows : 0; }

  void weigh_values_in_lanes(Range keys, int level, int lines) {
    const int wide = wide_rows();
    for (int column = 0; column < padded_; column += kPanel) {
      const float* v = v_ + column * kSegment + keys.begin * kPanel;
      const int columns = std::min(kPanel, padded_ - column), count = keys.end - keys.begin;
      for (int row = 0; row < wide; row += kWeighedRows)
        weigh_row_lanes(scores(row) + keys.begin, v, count, o(level, row) + column, padded_,
                        columns, rows_ahead_, lines);
      for (int row = wide; row < tile_.rows; row += kBlockRows)
        multiply({scores(row) + keys.begin, kSegment}, {v, kPanel}, count, o(level, row) + column,
                 padded_, std::min(kBlockRows, tile_.rows - row), columns);
    }
  }

  void multiply_weights_values(int level) {
    for (int column = 0; column < padded_; column += kPanel) {
      for (int block = 0; block < blocks_; ++block) {
        const auto [begin, end] = seen_[block];
        const int row = block * kBlockRows;
        const float* v = v_ + column * kSegment + begin * kPanel;
        multiply({scores(row) + begin, kSegment}, {v, kPanel}, end - begin, o(level, row) + column,
                 padded_, rows_of(block), std::min(kPanel, padded_ - column));
        ahead_.next(lines_);
      }
    }
  }

  /// Recomputes rows of a head that became infinite or NaN because of a key that they do not see,
  /// and scales all.
  void finish_rows(const Segment& segment, Range any, int level, int head) {
    bool packed = !few_;
    float* const of_head = o(level, head * tile_.rows);
    for (int r = 0; r < tile_.rows; ++r) {
      if (is_finite_row(of_head + r * padded_, padded_)) continue;
      if (!packed) {
        pack(segment, head, any, 0);
        packed = true;
        found_ = false;
      }
      multiply_seen(scores(head * tile_.rows + r), v_, seen_[r / kBlockRows], of_head + r * padded_,
                    padded_);
    }
    // The scale is applied here, not when the state is stored: the state of a rank and of a virtual
    // rank are then alike, so the bits do not depend on the number of ranks, whatever the factor.
    if (p_.v_scale)
      for (int r = 0; r < tile_.rows; ++r)
        multiply_row(p_.v_scale.of(tile_.sequence.index, tile_.kv_head + head),
                     of_head + r * padded_);
  }

  void multiply_row(float factor, float* row) const {
    const Lanes d;
    for (int c = 0; c < padded_; c += kLanes)
      hn::StoreU(hn::Mul(hn::LoadU(d, row + c), hn::Set(d, factor)), d, row + c);
  }

  /// A row for missing rows, valid for any type.
  static constexpr float kZeros[kMaxHeadDim] = {};

  const AttendParams& p_;
  const Tile& tile_;
  const PackedSegments& packed_;
  const TileSpace& space_;
  const VisibleRows<kTileRows> visible_;
  const float* k_ = nullptr;  // of the current segment, packed
  const float* v_ = nullptr;
  LinesAhead ahead_;          // of the next segment's keys
  RowLinesAhead rows_ahead_;  // the same, of keys that are not packed
  std::int64_t lines_ = 0;
  KeyRows
      rows_;  // of the current segment or, with few rows and with rows in lanes, of the next one
  bool found_ = false;                    // while the segment before was processed
  const std::byte* order_[3 * kSegment];  // of few rows: keys, values, and the next segment's keys
  SegmentBias bias_;
  SegmentDropout dropout_;
  const int padded_;
  const int blocks_;                                       // of kBlockRows rows
  const bool few_;                                         // keys and values are not packed
  const bool in_lanes_;                                    // rows are in lanes, keys not transposed
  Range seen_[(kTileRows + kBlockRows - 1) / kBlockRows];  // by each block, in the current segment
};

void attend_tile(const AttendParams& params, const Tile& tile, const PackedSegments& packed,
                 const TileSpace& space) {
  TileRun(params, tile, packed, space)();
}

bool has_few_rows() { return kHasFewRows; }

}  // namespace HWY_NAMESPACE
}  // namespace longspan::kernels::host
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace longspan::kernels::host {

HWY_EXPORT(attend_tile);
HWY_EXPORT(fold_states);
HWY_EXPORT(pack_segment);
HWY_EXPORT(has_few_rows);

bool has_few_rows() { return HWY_DYNAMIC_DISPATCH(has_few_rows)(); }

void pack_segment(const AttendParams& params, const KeyRows& rows, Range keys, float* segment) {
  HWY_DYNAMIC_DISPATCH(pack_segment)(params, rows, keys, segment);
}

void attend_tile(const AttendParams& params, const Tile& tile, const PackedSegments& packed,
                 const TileSpace& space) {
  HWY_DYNAMIC_DISPATCH(attend_tile)(params, tile, packed, space);
}

void fold_states(Stats* a_stats, float* a, const Stats* b_stats, const float* b, int rows,
                 int padded) {
  HWY_DYNAMIC_DISPATCH(fold_states)(a_stats, a, b_stats, b, rows, padded);
}

}  // namespace longspan::kernels::host
#endif
