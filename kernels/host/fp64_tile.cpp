// One tile of products of fp64, in forward and backward (fp64.hpp).
#include "kernels/host/targets.hpp"
// Highway compiles the rest of this file once for each target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/fp64_tile.cpp"
#include "hwy/foreach_target.h"  // first
//
#include <algorithm>
#include <cmath>
#include <limits>

#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "kernels/host/fp64.hpp"
#include "kernels/host/key_rows.hpp"

HWY_BEFORE_NAMESPACE();
namespace longspan::kernels::host {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using Wide = hn::CappedTag<double, kWideColumns>;
inline constexpr int kWide = hn::MaxLanes(Wide());
constexpr double kHidden = -std::numeric_limits<double>::infinity();

/// to[r][j] = sum over c of a[r][c] b[c][j], for all 128 j. Every sum is one chain over c.
void multiply(const double* a, int columns, const double* b, int rows, double* to) {
  const Wide d;
  constexpr int kBlock = 4;
  for (int r = 0; r < rows; r += kBlock)
    for (int j = 0; j < kSegment; j += 2 * kWide) {
      hn::Vec<Wide> left[kBlock], right[kBlock];
      for (int i = 0; i < kBlock; ++i) left[i] = right[i] = hn::Zero(d);
      for (int c = 0; c < columns; ++c) {
        const auto low = hn::LoadU(d, b + c * kSegment + j);
        const auto high = hn::LoadU(d, b + c * kSegment + j + kWide);
        for (int i = 0; i < kBlock; ++i) {
          const auto factor = hn::Set(d, a[(r + i) * columns + c]);
          left[i] = hn::MulAdd(factor, low, left[i]);
          right[i] = hn::MulAdd(factor, high, right[i]);
        }
      }
      for (int i = 0; i < kBlock; ++i) {
        hn::StoreU(left[i], d, to + (r + i) * kSegment + j);
        hn::StoreU(right[i], d, to + (r + i) * kSegment + j + kWide);
      }
    }
}

/// to[c] += sum over the keys of weights[j] rows[j][c]; `columns` is padded. A weight of 0 leaves
/// its row out, whatever that holds.
void add_rows(const double* weights, Range keys, const double* rows, int columns, double* to) {
  const Wide d;
  constexpr int kBlock = 4;
  for (int c = 0; c < columns; c += kBlock * kWide) {
    const int used = std::min(kBlock, (columns - c + kWide - 1) / kWide);
    hn::Vec<Wide> sums[kBlock];
    for (int i = 0; i < kBlock; ++i)
      sums[i] = i < used ? hn::LoadU(d, to + c + i * kWide) : hn::Zero(d);
    for (int j = keys.begin; j < keys.end; ++j) {
      if (weights[j] == 0) continue;
      const auto weight = hn::Set(d, weights[j]);
      for (int i = 0; i < used; ++i)
        sums[i] = hn::MulAdd(weight, hn::LoadU(d, rows + std::int64_t{j} * columns + c + i * kWide),
                             sums[i]);
    }
    for (int i = 0; i < used; ++i) hn::StoreU(sums[i], d, to + c + i * kWide);
  }
}

/// to[c] += weight row[c]. A weight of 0 leaves the row out, whatever it holds.
void add_row(double weight, const double* row, int columns, double* to) {
  if (weight == 0) return;
  const Wide d;
  const auto factor = hn::Set(d, weight);
  int c = 0;
  for (; c + kWide <= columns; c += kWide)
    hn::StoreU(hn::MulAdd(factor, hn::LoadU(d, row + c), hn::LoadU(d, to + c)), d, to + c);
  const hn::CappedTag<double, 1> one;
  for (; c < columns; ++c)
    hn::StoreU(hn::MulAdd(hn::Set(one, weight), hn::LoadU(one, row + c), hn::LoadU(one, to + c)),
               one, to + c);
}

/// x[j] = exp(x[j] - shift), and their sum in the order of j is returned.
double weigh(double* x, Range keys, double shift) {
  const Wide d;
  const int begin = keys.begin / kWide * kWide;
  for (int j = begin; j < keys.end; j += kWide) {
    const auto score = hn::LoadU(d, x + j);
    const auto below = hn::Sub(score, hn::Set(d, shift));
    const auto weight = hn::IfThenElse(hn::IsNaN(below), below, hn::Exp(d, below));
    hn::StoreU(hn::IfThenZeroElse(hn::Eq(score, hn::Set(d, kHidden)), weight), d, x + j);
  }
  double sum = 0;
  for (int j = keys.begin; j < keys.end; ++j) sum += x[j];
  return sum;
}

/// The row of a tile: whose it is, and where it lies.
struct WideRow {
  std::int64_t token;  // of the batch
  std::int64_t index;  // among its sequence's rows on all ranks
  int head;

  WideRow(const Geometry& p, const Tile& tile, int row) {
    const int group = p.heads / p.kv_heads;
    const std::int64_t own = (tile.first + row) / group;
    token = tile.sequence.first_row + own;
    index = p.query_index(tile.sequence.index, own);
    head = static_cast<int>(tile.kv_head * group + (tile.first + row) % group);
  }
};

/// Packs rows [tokens, heads, dim] of a tile; those past its last are 0.
void pack_rows(const Geometry& p, const Tile& tile, const TokenRows& from, int dim, double* to) {
  std::fill_n(to, kWideRows * dim, 0.0);
  for (int r = 0; r < tile.rows; ++r) {
    const WideRow row(p, tile, r);
    std::copy_n(from.at<double>(row.token, row.head), dim, to + r * dim);
  }
}

/// Packs keys and values that some row sees; the others are 0. Null: not wanted.
struct PackedTo {
  double *columns, *rows;  // [dim, 128] and [128, padded dim]
};
void pack_side(const std::byte* const* from, const KvRows& layout, int dim, Range keys,
               const PackedTo& to) {
  const int padded = WideSpace::padded(dim);
  if (to.columns != nullptr) std::fill_n(to.columns, dim * kSegment, 0.0);
  if (to.rows != nullptr) std::fill_n(to.rows, kSegment * padded, 0.0);
  for (int j = keys.begin; j < keys.end; ++j) {
    if (from[j] == nullptr) continue;
    const auto* const row = reinterpret_cast<const double*>(from[j]);
    for (int c = 0; c < dim; ++c) {
      const double element = row[layout.column(c)];
      if (to.columns != nullptr) to.columns[c * kSegment + j] = element;
      if (to.rows != nullptr) to.rows[j * padded + c] = element;
    }
  }
}

/// Adds ALiBi and qq_bias. A bias of -inf hides its key, whatever its score is.
void add_bias(const Geometry& p, const Sequence& s, const WideRow& row, const Segment& segment,
              Range keys, double* scores) {
  if (!p.bias) return;
  const std::int64_t i = s.context_len + row.index;
  const double slope = p.bias.slopes ? double{p.bias.slopes.of(s.index, row.head)} : 0.0;
  const auto distance = [&](std::int64_t j) {
    if (p.bias.alibi == Alibi::context) return static_cast<double>(j - s.context_len);
    if (p.bias.alibi == Alibi::query) return -std::abs(static_cast<double>(i - j));
    return j < i ? -std::sqrt(static_cast<double>(i - j)) : 0.0;
  };
  const QqBias& qq = p.bias.qq;
  for (int j = keys.begin; j < keys.end; ++j) {
    const std::int64_t position = s.shard.position(segment.first + j, s.kv_len);
    const std::int64_t column = position - s.context_len;
    double bias = p.bias.slopes ? slope * distance(position) : 0.0;
    if (qq && row.index < qq.width && column >= 0 && column < qq.width)
      bias += double{qq.values[row.index * qq.row_stride + column]};
    scores[j] = bias == kHidden ? bias : scores[j] + bias;
  }
}

/// Makes a row's scores of a segment from its products; those that it does not see are -inf.
/// `slope`: the derivatives by the scaled products; or null. Returns the keys that it sees.
Range make_scores(const Geometry& p, const Tile& tile, const Visible& visible,
                  const Segment& segment, int r, double* scores, double* slope) {
  const Range keys = visible.keys(segment, r, r);
  std::fill(scores, scores + keys.begin, kHidden);
  std::fill(scores + keys.end, scores + kSegment, kHidden);
  const double scale = p.wide_score.scale, cap = p.wide_score.softcap;
  for (int j = keys.begin; j < keys.end; ++j) {
    const double x = scores[j] * scale;
    const double capped = cap != 0 ? std::tanh(x / cap) : 0.0;
    if (slope != nullptr) slope[j] = 1 - capped * capped;
    scores[j] = cap != 0 ? cap * capped : x;
  }
  add_bias(p, tile.sequence, WideRow(p, tile, r), segment, keys, scores);
  visible.hide(segment, r, keys, scores);
  return keys;
}

/// Calls visit(j, factor) with the factors of dropout for the keys of a row.
template <class Visit>
void for_each_factor(const Geometry& p, const Tile& tile, const Segment& segment, int r, Range keys,
                     const Visit& visit) {
  const Sequence& s = tile.sequence;
  const WideRow row(p, tile, r);
  const DropoutRow of =
      p.dropout.row(p.dropout.key(), s.index, row.head, s.context_len + row.index);
  for (int j = keys.begin; j < keys.end; ++j) {
    const std::uint32_t word = of.one(s.shard.position(segment.first + j, s.kv_len));
    visit(j, p.dropout.keeps(word) ? p.dropout.wide_scale : 0.0);
  }
}

/// Adds the keys of a segment to a row: max, sum and o.
void attend_row(const Geometry& p, const Tile& tile, const Segment& segment, double* scores,
                Range keys, const WideSpace& space, int columns, int r) {
  double& max = space.max[r];
  double most = kHidden;
  for (int j = keys.begin; j < keys.end; ++j)
    if (!(scores[j] <= most)) most = scores[j];  // NaN too
  if (most == kHidden) return;
  double* const o = space.o + r * columns;
  if (!(most <= max)) {
    const double ratio = max == kHidden ? 0.0 : std::exp(max - most);
    space.sum[r] *= ratio;
    for (int c = 0; c < columns; ++c) o[c] *= ratio;
    max = most;
  }
  space.sum[r] += weigh(scores, keys, max);
  if (p.dropout)
    for_each_factor(p, tile, segment, r, keys, [&](int j, double factor) {
      scores[j] = factor == 0 ? 0.0 : scores[j] * factor;
    });
  add_rows(scores, keys, space.values, columns, o);
}

void finish_row(const AttendParams& p, const MergeParams& result, const WideRow& row,
                const WideSpace& space, int r) {
  double max = space.max[r], sum = space.sum[r], factor = 1;
  bool sees_some = max != kHidden;
  if (result.sinks) {  // one more state of weight 1, without a value
    const double sink = result.sinks[row.head];
    if (!sees_some || !(max >= sink)) {
      factor = sees_some ? std::exp(max - sink) : 0.0;
      sum = sum * factor + 1;
      max = std::isnan(max) ? max : sink;
    } else {
      sum += std::exp(sink - max);
    }
    sees_some = true;
  }
  const double* const o = space.o + r * WideSpace::padded(p.value_dim);
  double* const out = result.out.at<double>(row.token, row.head);
  for (int c = 0; c < p.value_dim; ++c) out[c] = sum == 0 ? 0.0 : o[c] * factor / sum;
  if (result.lse.data == nullptr) return;
  *wide_lse(result.lse, row.token, row.head) = sees_some ? max + std::log(sum) : kHidden;
}

void attend(const AttendParams& p, const MergeParams& result, const Tile& tile,
            const WideSpace& space) {
  const VisibleRows<kWideRows> visible(p, tile);
  const int columns = WideSpace::padded(p.value_dim);
  pack_rows(p, tile, p.q, p.head_dim, space.q);
  std::fill_n(space.o, kWideRows * columns, 0.0);
  std::fill_n(space.max, kWideRows, kHidden);
  std::fill_n(space.sum, kWideRows, 0.0);
  KeyRows rows;
  for (Interval seen = visible.next(0); !seen.empty();) {
    const Segment segment = segment_of(tile.sequence, seen.begin / kSegment);
    const Range any = visible.keys(segment, 0, tile.rows - 1);
    find_seen(p, tile, visible, tile.kv_head, segment, any, 0, rows);
    pack_side(rows.k(), p.k, p.head_dim, any, {space.keys, nullptr});
    pack_side(rows.v(), p.v, p.value_dim, any, {nullptr, space.values});
    multiply(space.q, p.head_dim, space.keys, tile.rows, space.scores);
    for (int r = 0; r < tile.rows; ++r) {
      double* const scores = space.scores + r * kSegment;
      const Range keys = make_scores(p, tile, visible, segment, r, scores, nullptr);
      attend_row(p, tile, segment, scores, keys, space, columns, r);
    }
    seen = visible.next(segment.first + kSegment);
  }
  for (int r = 0; r < tile.rows; ++r) finish_row(p, result, WideRow(p, tile, r), space, r);
}

void pack_gradient_rows(const GradientParams& p, const Tile& tile, const WideSpace& space) {
  pack_rows(p, tile, p.q, p.head_dim, space.q);
  pack_rows(p, tile, p.dout, p.value_dim, space.dout);
}

void add_gradients(const GradientParams& p, const Tile& tile, const Segment& segment,
                   const WideSpace& space, const WideGradients& to) {
  const VisibleRows<kWideRows> visible(p, tile);
  if (!visible.some_row_sees(segment)) return;
  const Range any = visible.keys(segment, 0, tile.rows - 1);
  KeyRows rows;
  find_seen(p, tile, visible, tile.kv_head, segment, any, 0, rows);
  pack_side(rows.k(), p.k, p.head_dim, any,
            {space.keys, to.dq == nullptr ? nullptr : space.key_rows});
  pack_side(rows.v(), p.v, p.value_dim, any, {space.value_columns, nullptr});
  const int head_sums = GradientSums::padded(p.head_dim),
            value_sums = GradientSums::padded(p.value_dim);
  multiply(space.q, p.head_dim, space.keys, tile.rows, space.scores);
  multiply(space.dout, p.value_dim, space.value_columns, tile.rows, space.dx);
  const auto* const terms = reinterpret_cast<const WideRowTerm*>(p.terms);
  for (int r = 0; r < tile.rows; ++r) {
    double *const weights = space.scores + r * kSegment, *const dx = space.dx + r * kSegment;
    const double* const slope = space.slope + r * kSegment;
    const WideRow row(p, tile, r);
    const WideRowTerm& term = terms[row.token * p.heads + row.head];
    const Range keys =
        make_scores(p, tile, visible, segment, r, weights, space.slope + r * kSegment);
    if (term.lse == kHidden)
      std::fill_n(weights, kSegment, 0.0);
    else
      weigh(weights, {0, kSegment}, term.lse);
    const auto take = [&](int j, double factor) {  // dP becomes dX, and P with the factor dV's
      const double of_weight = factor == 0 ? 0.0 : factor * dx[j];
      dx[j] =
          weights[j] == 0 ? 0.0 : p.wide_score.scale * weights[j] * (of_weight - term.d) * slope[j];
      weights[j] = factor == 0 ? 0.0 : weights[j] * factor;
    };
    if (p.dropout)
      for_each_factor(p, tile, segment, r, {0, segment.keys}, take);
    else
      for (int j = 0; j < kSegment; ++j) take(j, 1.0);
    if (to.dq != nullptr)
      add_rows(dx, keys, space.key_rows, WideSpace::padded(p.head_dim), to.dq + r * head_sums);
  }
  if (to.dk == nullptr) return;
  for (int j = any.begin; j < any.end; ++j)
    for (int r = 0; r < tile.rows; ++r) {
      add_row(space.dx[r * kSegment + j], space.q + r * p.head_dim, p.head_dim,
              to.dk + j * head_sums);
      add_row(space.scores[r * kSegment + j], space.dout + r * p.value_dim, p.value_dim,
              to.dv + j * value_sums);
    }
}

}  // namespace HWY_NAMESPACE
}  // namespace longspan::kernels::host
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace longspan::kernels::host {

HWY_EXPORT(attend);
HWY_EXPORT(pack_gradient_rows);
HWY_EXPORT(add_gradients);

void attend_fp64_tile(const AttendParams& p, const MergeParams& result, const Tile& tile,
                      const WideSpace& space) {
  HWY_DYNAMIC_DISPATCH(attend)(p, result, tile, space);
}
void pack_fp64_rows(const GradientParams& p, const Tile& tile, const WideSpace& space) {
  HWY_DYNAMIC_DISPATCH(pack_gradient_rows)(p, tile, space);
}
void gradient_fp64_tile(const GradientParams& p, const Tile& tile, const Segment& segment,
                        const WideSpace& space, const WideGradients& to) {
  HWY_DYNAMIC_DISPATCH(add_gradients)(p, tile, segment, space, to);
}

}  // namespace longspan::kernels::host
#endif
