// Softcap, ALiBi and qq_bias on one row of scores, in vectors. The arithmetic is that of
// Bias::operator(), and so are the bits,
//
//     score += (slope * distance + qq[i][j]) * log2 e
//
// but a bias of -inf hides its key whatever the score was, NaN included. Backward has the gradients
// of slopes and qq_bias from here.
#include "kernels/host/targets.hpp"

#if defined(LONGSPAN_HOST_BIAS_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef LONGSPAN_HOST_BIAS_INL
#undef LONGSPAN_HOST_BIAS_INL
#else
#define LONGSPAN_HOST_BIAS_INL
#endif

#include <algorithm>
#include <limits>

#include "hwy/highway.h"
#include "kernels/host/simd-inl.hpp"
#include "kernels/host/tile.hpp"
#include "kernels/host/visible.hpp"
#include "longspan/score.hpp"

HWY_BEFORE_NAMESPACE();
namespace longspan::kernels::host {
namespace HWY_NAMESPACE {

/// Turns scores that were divided by the softcap into capped ones of base 2.
HWY_INLINE void cap(float* scores, Range keys, float softcap) {
  const Lanes d;
  const Vec high = hn::Set(d, softcap * kLog2E);
  for (int j = keys.begin; j < keys.end; j += kLanes)
    hn::Store(hn::Mul(high, tanh(hn::Load(d, scores + j))), d, scores + j);
}

class SegmentBias {
 public:
  SegmentBias(const Geometry& params, const Tile& tile) : p_(params), tile_(tile) {
    const Sequence& s = tile.sequence;
    in_32_bits_ = 2 * s.kv_len - s.context_len <= std::numeric_limits<std::int32_t>::max();
  }

  /// Computes the positions of the segment's keys.
  void start(const Segment& segment) {
    const Sequence& s = tile_.sequence;
    segment_ = segment;
    index_ = -1;
    consecutive_ = s.shard.consecutive_in_segment();
    if (!in_32_bits_) return;
    const std::int64_t first = s.shard.position(segment.first, s.kv_len) - s.context_len;
    for (int j = 0; j < segment.keys; ++j)
      column_[j] = static_cast<std::int32_t>(
          consecutive_ ? first + j : s.shard.position(segment.first + j, s.kv_len) - s.context_len);
    std::fill(column_ + segment.keys, column_ + kSegment, column_[segment.keys - 1]);
  }

  /// Adds the biases to the scores of the tile's row `row` of a kv head. `keys` is aligned to 16.
  void add(int kv_head, int row, Range keys, float* scores) {
    const int group = p_.heads / p_.kv_heads;
    const std::int64_t index = index_of(row);
    const int head = static_cast<int>(kv_head * group + (tile_.first + row) % group);
    if (!in_32_bits_) return add_each(index, head, keys, scores);
    if (index != index_) {  // the heads of a group share a row of qq_bias
      index_ = index;
      some_qq_ = p_.bias.qq && find_qq(index);
    }
    if (!p_.bias.slopes && !some_qq_) return;
    const int sequence = tile_.sequence.index;
    const float slope = p_.bias.slopes ? p_.bias.slopes.of(sequence, head) : 0.0f;
    const Lanes d;
    for (int j = keys.begin; j < keys.end; j += kLanes) {
      auto bias = hn::Mul(hn::Set(d, slope), distances(index, j));
      if (some_qq_) bias = hn::Add(bias, hn::Load(d, qq_ + j));
      bias = hn::Mul(bias, hn::Set(d, kLog2E));
      const auto hidden = hn::Eq(bias, hn::Set(d, -infinity()));
      const auto sum = hn::Add(hn::Load(d, scores + j), bias);
      hn::Store(hn::IfThenElse(hidden, bias, sum), d, scores + j);
    }
  }

  /// The sum of a row's gradients of scores, `ds` [128], times the distances of its keys.
  double slope_gradient(int row, Range keys, const float* ds) const {
    const std::int64_t index = index_of(row);
    if (!in_32_bits_) {
      double sum = 0;
      for_each_position(keys, [&](int j, std::int64_t position) {
        const Sequence& s = tile_.sequence;
        sum += double{ds[j]} * double{alibi_distance(p_.bias.alibi, s.context_len + index, position,
                                                     s.context_len)};
      });
      return sum;
    }
    const Lanes d;
    Vec sums[kLaneSums];
    for (Vec& sum : sums) sum = hn::Zero(d);
    for (int j = keys.begin; j < keys.end; j += 16)
      for (int i = 0; i < kLaneSums; ++i) {
        const int at = j + i * kLanes;
        sums[i] = hn::MulAdd(hn::Load(d, ds + at), distances(index, at), sums[i]);
      }
    return double{sum_lanes(sums)};
  }

  /// Adds a row's gradients of scores to the entries of qq_bias that they had; `to` has rows of
  /// `stride`.
  void add_qq_gradient(int row, Range keys, const float* ds, float* to, std::int64_t stride) const {
    const std::int64_t index = index_of(row), width = p_.bias.qq.width;
    if (index >= width) return;
    to += index * stride;
    if (in_32_bits_) {
      for (int j = keys.begin; j < std::min(keys.end, segment_.keys); ++j)
        if (column_[j] >= 0 && column_[j] < width) to[column_[j]] += ds[j];
      return;
    }
    for_each_position(keys, [&](int j, std::int64_t position) {
      const std::int64_t column = position - tile_.sequence.context_len;
      if (column >= 0 && column < width) to[column] += ds[j];
    });
  }

 private:
  /// The index of a row's query among those of its sequence.
  std::int64_t index_of(int row) const {
    return p_.query_index(tile_.sequence.index, (tile_.first + row) / (p_.heads / p_.kv_heads));
  }

  /// The distances of the segment's keys from j on that slopes multiply.
  HWY_INLINE Vec distances(std::int64_t index, int j) const {
    const bool by_query = p_.bias.alibi == Alibi::query, by_root = p_.bias.alibi == Alibi::sqrt;
    const hn::RebindToSigned<Lanes> integer;
    const auto own = hn::Set(integer, static_cast<std::int32_t>(index));
    auto distance = hn::Load(integer, column_ + j);
    if (by_query) {
      const auto ahead = hn::Sub(distance, own);
      distance = hn::Min(ahead, hn::Neg(ahead));
    }
    if (by_root) distance = hn::Max(hn::Sub(own, distance), hn::Zero(integer));
    const auto steps = hn::ConvertTo(Lanes(), distance);
    return by_root ? hn::Neg(hn::Sqrt(steps)) : steps;
  }

  template <class Visit>
  void for_each_position(Range keys, const Visit& visit) const {
    const Sequence& s = tile_.sequence;
    for (int j = keys.begin; j < std::min(keys.end, segment_.keys); ++j)
      visit(j, s.shard.position(segment_.first + j, s.kv_len));
  }

  /// Finds the query's row of qq_bias for the keys of the segment, with 0 for keys without an
  /// entry. Returns false if none has one.
  bool find_qq(std::int64_t index) {
    const QqBias& qq = p_.bias.qq;
    if (index >= qq.width) return false;
    const std::int64_t row = index * qq.row_stride;
    if (!consecutive_) {
      bool some = false;
      for (int j = 0; j < kSegment; ++j) {
        const bool has = column_[j] >= 0 && column_[j] < qq.width;
        qq_[j] = has ? qq.values[row + column_[j]] : 0.0f;
        some = some || has;
      }
      return some;
    }
    const auto key = [&](std::int64_t column) {
      return static_cast<int>(std::clamp<std::int64_t>(column - column_[0], 0, segment_.keys));
    };
    const int begin = key(0), end = key(qq.width);
    if (begin >= end) return false;
    std::fill(qq_, qq_ + begin, 0.0f);
    std::fill(qq_ + end, qq_ + kSegment, 0.0f);
    with_type(qq.values.dtype, [&]<class T>(const T*) {
      const T* values = static_cast<const T*>(qq.values.data);
      const Lanes8 d;
      int j = begin;
      for (; j + kLanes8 <= end; j += kLanes8)
        hn::StoreU(load(d, values + (row + column_[j])), d, qq_ + j);
      for (; j < end; ++j) qq_[j] = qq.values[row + column_[j]];
    });
    return true;
  }

  /// Adds the biases one by one, for positions past 2^31.
  void add_each(std::int64_t index, int head, Range keys, float* scores) const {
    const Sequence& s = tile_.sequence;
    for_each_position(keys, [&](int j, std::int64_t position) {
      const float bias = p_.bias(s.index, head, s.context_len + index, position, s.context_len);
      scores[j] = bias == -infinity() ? bias : scores[j] + bias;
    });
  }

  const Geometry& p_;
  const Tile& tile_;
  bool in_32_bits_ = true;
  bool consecutive_ = true;
  bool some_qq_ = false;
  std::int64_t index_ = -1;  // among the sequence's queries, that of qq_
  Segment segment_;
  HWY_ALIGN std::int32_t column_[kSegment] = {};  // position of a key - context_len
  HWY_ALIGN float qq_[kSegment];
};

}  // namespace HWY_NAMESPACE
}  // namespace longspan::kernels::host
HWY_AFTER_NAMESPACE();

#endif  // per target
