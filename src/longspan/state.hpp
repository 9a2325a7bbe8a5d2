/// \file
/// The algebra of partial states, which everything else builds on. A partial attention state of one
/// (query row, head) is
///
///     m = max score,   l = sum exp(score - m),   o = sum exp(score - m) * v
///
/// and two states over disjoint keys merge into the state over their union. Merging is commutative
/// (bitwise: every fma is written out, so no compiler contracts it in another way) and associative
/// within rounding; its identity is the empty state. Scores are in base 2 here (score * log2 e), so
/// that exponentials are exp2. Logarithms are natural at every public interface. Log-sum-exps from
/// elsewhere fold in their own base: a natural one of 3e38 overflows in base 2.
///
/// The method is online softmax (Milakov and Gimelshein, arXiv 1805.02867); for the algebra of
/// states see FlashInfer, arXiv 2501.01005, section 2.2.
#pragma once

#include <cmath>
#include <limits>

#include "longspan/types.hpp"

namespace longspan {

/// log2 e: converts natural units to base 2.
inline constexpr float kLog2E = 1.44269504088896340736f;
/// ln 2: the reverse.
inline constexpr float kLn2 = 0.69314718055994530942f;

/// The two scalars of a state. A state is empty if and only if `sum == 0`; max and o are then never
/// read.
struct Stats {
  float max;  ///< largest score, in base 2 unless a function says otherwise
  float sum;  ///< of exp(score - max), in the base of the scores
};

/// Positive infinity.
LONGSPAN_HD inline float infinity() { return std::numeric_limits<float>::infinity(); }
/// The state of no keys, with which every merge starts.
LONGSPAN_HD inline Stats empty_stats() { return {-infinity(), 0.0f}; }
/// Whether a state covers no visible key.
LONGSPAN_HD inline bool is_empty(Stats s) { return s.sum == 0.0f; }

/// How two states become one: computed once per (row, head), then applied to each element of o.
struct Fold {
  /// Which side's o leads, and whether the other counts at all.
  enum Take : int {
    first,        ///< the first alone; the second is empty
    second,       ///< the second alone; the first is empty
    first_high,   ///< both, and the first has the higher max
    second_high,  ///< both, and the second has the higher max
  };

  Stats stats;  ///< of the merged state
  float ratio;  ///< exp(lower max - higher max), in their base; not read when one side is empty
  Take take;    ///< how elements of o merge

  /// Element of the merged o. An empty side is skipped by selection, so its payload, NaN included,
  /// does not reach the result.
  LONGSPAN_HD float operator()(float a, float b) const {
    const bool second_leads = take == second || take == second_high;  // selections, not branches
    const float high = second_leads ? b : a, low = second_leads ? a : b;
    return take == first || take == second ? high : ::fmaf(low, ratio, high);
  }
};

/// exp(low - high) in the given base; `high` is not lower than `low`. A difference beyond the
/// largest float correctly gives 0.
LONGSPAN_HD inline float fold_ratio(float low, float high, LogBase base = LogBase::two) {
  const float difference = low - high;
  return ::exp2f(base == LogBase::two ? difference : difference * kLog2E);
}

/// merge(a, b) on the scalars, whose maxima are in one base. A NaN on a side that is not empty
/// stays a NaN in the result.
LONGSPAN_HD inline Fold fold(Stats a, Stats b, LogBase base = LogBase::two) {
  if (is_empty(a)) return {is_empty(b) ? empty_stats() : b, 0.0f, Fold::second};
  if (is_empty(b)) return {a, 0.0f, Fold::first};
  if (a.max >= b.max) {
    const float ratio = fold_ratio(b.max, a.max, base);
    return {{a.max, ::fmaf(b.sum, ratio, a.sum)}, ratio, Fold::first_high};
  }
  const float ratio = fold_ratio(a.max, b.max, base);
  return {{b.max, ::fmaf(a.sum, ratio, b.sum)}, ratio, Fold::second_high};
}

/// Converts a natural score to base 2. Finite scores stay finite: those past +-2.3e38, which would
/// overflow in base 2, become the largest float.
LONGSPAN_HD inline float to_base_2(float score) {
  constexpr float kLargest = std::numeric_limits<float>::max();
  constexpr float kMost = kLargest / kLog2E * (1.0f - 0x1p-23f);  // its value in base 2 is below
                                                                  // kLargest
  if (score > kMost && score < infinity()) return kLargest;
  if (score < -kMost && score > -infinity()) return -kLargest;
  return score * kLog2E;
}

/// A learned sink is one extra state (sink, 1, 0): it takes probability and adds no value. It is
/// merged exactly once, in finish. `sink` is a score in natural units, clamped to +-2.3e38.
LONGSPAN_HD inline Stats sink_stats(float sink) { return {to_base_2(sink), 1.0f}; }

/// The final division: out = o / sum, lse = max + ln sum (natural). An empty state gives 0 and
/// -inf.
struct Finish {
  float sum;  ///< divisor of o; 0 for an empty state
  float lse;  ///< natural log

  /// An element of the result from an element of o.
  LONGSPAN_HD float operator()(float o) const { return sum == 0.0f ? 0.0f : o / sum; }
};

/// The final division of a state, into which the sink is already merged. A NaN max becomes a NaN
/// result.
LONGSPAN_HD inline Finish finish(Stats s) {
  if (is_empty(s)) return {0.0f, -infinity()};
  const bool is_nan = s.max != s.max;  // an imported NaN, which must not become a number
  return {is_nan ? s.max : s.sum, ::fmaf(s.max, kLn2, ::logf(s.sum))};
}

/// State of a finished (out, lse) pair from elsewhere, in the base of its lse, which it keeps
/// unchanged; its o is `out` itself. Such states fold by fold(a, b, base). An lse of -inf or +inf
/// means empty (FlashAttention-2 writes +inf). NaN stays NaN unless `nan_is_empty`.
LONGSPAN_HD inline Stats part_stats(float lse, bool nan_is_empty = false) {
  if (lse == infinity() || lse == -infinity()) return empty_stats();
  if (lse != lse && nan_is_empty) return empty_stats();
  return {lse, 1.0f};
}

/// The lse of a state whose max is in `base`, in the same base. Empty is -inf.
LONGSPAN_HD inline float part_lse(Stats s, LogBase base) {
  if (is_empty(s)) return -infinity();
  return s.max + (base == LogBase::two ? ::log2f(s.sum) : ::logf(s.sum));
}

/// part_stats in base 2, for folds with longspan's own states. A finite lse stays finite
/// (to_base_2).
LONGSPAN_HD inline Stats import_lse(float lse, LogBase base, bool nan_is_empty = false) {
  const Stats part = part_stats(lse, nan_is_empty);
  return base == LogBase::two || is_empty(part) ? part : Stats{to_base_2(part.max), part.sum};
}

/// The reverse: the lse of a state, for callers. Empty is -inf in both bases.
LONGSPAN_HD inline float export_lse(Stats s, LogBase base) {
  if (base == LogBase::e || is_empty(s)) return finish(s).lse;
  return part_lse(s, base);
}

}  // namespace longspan
