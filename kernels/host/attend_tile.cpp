// Attends one tile, in vectors. Each segment of 128 keys is folded from scratch,
//
//     s = score(Q K^T),   m = max s,   p = exp2(s - m),   l = sum p,   o = P V
//
// into a state per row, and the states fold in the fixed order. A row has the same bits in every
// tile: its products are chains (multiply-inl.hpp), its sum of weights has a shape of 16 lanes over
// the whole segment, and keys that it does not see add exact zeros, or nothing at all. How keys and
// values are stored (pages, layout, type) ends where they are packed.
#include "kernels/host/targets.hpp"
// Highway compiles the rest of this file once for each target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/attend_tile.cpp"
#include "hwy/foreach_target.h"  // first
//
#include <algorithm>

#include "hwy/highway.h"
#include "kernels/host/bias-inl.hpp"
#include "kernels/host/fold_stack.hpp"
#include "kernels/host/key_rows.hpp"
#include "kernels/host/multiply-inl.hpp"
#include "kernels/host/pack-inl.hpp"
#include "kernels/host/simd-inl.hpp"
#include "kernels/host/tile.hpp"
#include "kernels/host/visible.hpp"

HWY_BEFORE_NAMESPACE();
namespace longspan::kernels::host {
namespace HWY_NAMESPACE {

constexpr int kLaneSums = 16 / kLanes;  // vectors that hold the 16 lanes of a sum

/// Adds the upper half to the lower half, until one lane is left.
template <class D>
HWY_INLINE float sum_halves([[maybe_unused]] D d, hn::Vec<D> lanes) {
#if HWY_TARGET != HWY_SCALAR
  if constexpr (hn::MaxLanes(d) > 1) {
    const hn::Half<D> half;
    return sum_halves(half, hn::Add(hn::LowerHalf(half, lanes), hn::UpperHalf(half, lanes)));
  }
#endif
  return hn::GetLane(lanes);
}

/// The sum of 16 lanes in one shape: lane i with lane i + 8, then i + 4, i + 2, i + 1.
HWY_INLINE float sum_lanes(Vec (&lanes)[kLaneSums]) {
  for (int half = kLaneSums / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] = hn::Add(lanes[i], lanes[i + half]);
  return sum_halves(Lanes(), lanes[0]);
}

/// Turns the scores of a row into its weights, in place, and returns its max and sum. `keys` is
/// aligned to 16.
HWY_INLINE Stats weigh(float* scores, Range keys) {
  const Lanes d;
  Vec top = hn::Set(d, -infinity());
  for (int j = keys.begin; j < keys.end; j += kLanes) top = hn::Max(top, hn::Load(d, scores + j));
  const float max = hn::GetLane(hn::MaxOfLanes(d, top));
  // Where all keys are invisible, the weights are exp2(-inf) = 0. A NaN, lost or not by Max, stays
  // in its weight.
  const Vec shift = hn::Set(d, max == -infinity() ? 0.0f : max);
  Vec sums[kLaneSums];
  for (Vec& sum : sums) sum = hn::Zero(d);
  for (int j = keys.begin; j < keys.end; j += 16) {
    for (int i = 0; i < kLaneSums; ++i) {
      float* score = scores + j + i * kLanes;
      const Vec weight = exp2(hn::Sub(hn::Load(d, score), shift));
      hn::Store(weight, d, score);
      sums[i] = hn::Add(sums[i], weight);
    }
  }
  return {max, sum_lanes(sums)};
}

HWY_INLINE void cap(float* scores, Range keys, float softcap) {
  const Lanes d;
  const Vec high = hn::Set(d, softcap * kLog2E);
  for (int j = keys.begin; j < keys.end; j += kLanes)
    hn::Store(hn::Mul(high, tanh(hn::Load(d, scores + j))), d, scores + j);
}

HWY_INLINE bool all_finite(const float* row, int n) {
  const Lanes d;
  Vec zero = hn::Zero(d);  // times a finite number: 0; times any other: NaN
  for (int c = 0; c < n; c += kLanes) zero = hn::MulAdd(hn::LoadU(d, row + c), hn::Zero(d), zero);
  return hn::AllTrue(d, hn::Eq(zero, hn::Zero(d)));
}

/// Computes what multiply does, but leaves out keys of weight 0, so that NaN or infinity in the
/// values of a key that this row does not see (and another row of the tile does) stays away from
/// it.
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

class TileRun {
 public:
  TileRun(const AttendParams& params, const Tile& tile, const TileSpace& space)
      : p_(params),
        tile_(tile),
        space_(space),
        visible_(params, tile),
        bias_(params, tile),
        padded_(TileSpace::padded(params.value_dim)),
        blocks_((tile.rows + kBlockRows - 1) / kBlockRows) {}

  void operator()() {
    pack_queries();
    FoldStack stack;
    const auto merge = [this](int a, int b) {
      fold_states(stats(a), o(a, 0), stats(b), o(b, 0), tile_.rows, padded_);
    };
    visible_.for_each_segment([&](std::uint64_t index, const Segment& segment) {
      attend_segment(segment, stack.push(index, merge));
    });
    if (stack.finish(merge)) return;
    std::fill_n(stats(0), tile_.rows, empty_stats());
    std::fill_n(o(0, 0), tile_.rows * padded_, 0.0f);
  }

 private:
  Stats* stats(int level) const { return space_.stats + level * space_.rows; }
  float* o(int level, int row) const {
    return space_.o + (std::int64_t{level} * space_.rows + row) * padded_;
  }
  float* scores(int row) const { return space_.scores + row * kSegment; }
  int rows_of(int block) const { return std::min(kBlockRows, tile_.rows - block * kBlockRows); }

  void pack_queries() {
    const int group = p_.heads / p_.kv_heads;
    const float scale = p_.scale(tile_.kv_head);
    const float factor = p_.score.softcap == 0.0f ? scale * kLog2E : scale / p_.score.softcap;
    with_type(p_.q_dtype, [&]<class T>(const T*) {
      for (int r = 0; r < tile_.rows; ++r) {
        const std::int64_t row = tile_.first + r;
        const T* q =
            p_.q.at<T>(tile_.sequence.first_row + row / group, tile_.kv_head * group + row % group);
        pack_query(q, factor, p_.head_dim, space_.q + r * p_.head_dim);
      }
    });
  }

  /// Finds and packs the keys that some row sees.
  void pack_segment(const Segment& segment, Range any) {
    rows_.clear();
    const auto find = [&](int begin, int end) {
      rows_.find(p_, tile_.sequence, tile_.kv_head, segment.first, begin, end);
    };
    if (visible_.listed()) {
      for (int j = any.begin; j < any.end; ++j)
        if (visible_.some_row_sees(segment.first + j)) find(j, j + 1);
    } else {  // and the next ones, for prefetches
      find(any.begin, static_cast<int>(std::min<std::int64_t>(any.end + kRowsAhead,
                                                              visible_.end() - segment.first)));
    }
    with_type(p_.kv_dtype, [&]<class T>(const T*) {
      pack_keys<T>(p_.k, rows_.k(), aligned(any), p_.head_dim, space_.k);
      pack_values<T>(p_.v, rows_.v(), any, p_.value_dim, space_.v);
    });
  }

  /// Writes the state of one segment to `level`.
  void attend_segment(const Segment& segment, int level) {
    Range any{kSegment, 0};  // the keys seen by some row
    for (int block = 0; block < blocks_; ++block) {
      const int row = block * kBlockRows;
      const Range keys = seen_[block] = visible_.keys(segment, row, row + rows_of(block) - 1);
      if (keys.begin == keys.end) continue;
      any = {std::min(any.begin, keys.begin), std::max(any.end, keys.end)};
    }
    pack_segment(segment, any);
    multiply_queries_keys();
    if (p_.bias) bias_.start(segment);
    for (int r = 0; r < tile_.rows; ++r) {
      const Range keys = aligned(seen_[r / kBlockRows]);
      if (p_.score.softcap != 0.0f) cap(scores(r), keys, p_.score.softcap);
      if (p_.bias) bias_.add(r, keys, scores(r));
      visible_.hide(segment, r, keys, scores(r));
      stats(level)[r] = weigh(scores(r), keys);
    }
    multiply_weights_values(level);
  }

  // Panels are the outer loop and blocks of rows the inner one: so a panel stays in the first-level
  // cache meanwhile.

  void multiply_queries_keys() {
    for (int panel = 0; panel < kSegment; panel += kPanel) {
      for (int block = 0; block < blocks_; ++block) {
        const Range keys = aligned(seen_[block]);
        const int begin = std::max(keys.begin, panel), end = std::min(keys.end, panel + kPanel);
        if (begin >= end) continue;
        const int row = block * kBlockRows;
        const float* k = space_.k + panel * p_.head_dim + begin - panel;
        multiply({space_.q + row * p_.head_dim, p_.head_dim}, {k, kPanel}, p_.head_dim,
                 scores(row) + begin, kSegment, rows_of(block), end - begin);
      }
    }
  }

  void multiply_weights_values(int level) {
    for (int column = 0; column < padded_; column += kPanel) {
      for (int block = 0; block < blocks_; ++block) {
        const auto [begin, end] = seen_[block];
        const int row = block * kBlockRows;
        const float* v = space_.v + column * kSegment + begin * kPanel;
        multiply({scores(row) + begin, kSegment}, {v, kPanel}, end - begin, o(level, row) + column,
                 padded_, rows_of(block), std::min(kPanel, padded_ - column));
      }
    }
    for (int r = 0; r < tile_.rows; ++r)
      if (!all_finite(o(level, r), padded_))
        multiply_seen(scores(r), space_.v, seen_[r / kBlockRows], o(level, r), padded_);
    // This is done here, and not when the state is stored: a rank's state and a virtual rank's then
    // differ in nothing, so the bits do not depend on the ranks whatever the factor.
    if (p_.v_scale)
      for (int r = 0; r < tile_.rows; ++r) multiply_row(p_.v_scale[tile_.kv_head], o(level, r));
  }

  void multiply_row(float factor, float* row) const {
    const Lanes d;
    for (int c = 0; c < padded_; c += kLanes)
      hn::StoreU(hn::Mul(hn::LoadU(d, row + c), hn::Set(d, factor)), d, row + c);
  }

  const AttendParams& p_;
  const Tile& tile_;
  const TileSpace& space_;
  const Visible visible_;
  KeyRows rows_;
  SegmentBias bias_;
  const int padded_;
  const int blocks_;                                       // of kBlockRows rows
  Range seen_[(kTileRows + kBlockRows - 1) / kBlockRows];  // by each block, in the segment at hand
};

void attend_tile(const AttendParams& params, const Tile& tile, const TileSpace& space) {
  TileRun(params, tile, space)();
}

}  // namespace HWY_NAMESPACE
}  // namespace longspan::kernels::host
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace longspan::kernels::host {

HWY_EXPORT(attend_tile);
HWY_EXPORT(fold_states);

void attend_tile(const AttendParams& params, const Tile& tile, const TileSpace& space) {
  HWY_DYNAMIC_DISPATCH(attend_tile)(params, tile, space);
}

void fold_states(Stats* a_stats, float* a, const Stats* b_stats, const float* b, int rows,
                 int padded) {
  HWY_DYNAMIC_DISPATCH(fold_states)(a_stats, a, b_stats, b, rows, padded);
}

}  // namespace longspan::kernels::host
#endif
