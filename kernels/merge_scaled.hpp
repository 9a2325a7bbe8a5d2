// Computes one element of a merge whose sum exceeds fp32 though all its terms are finite: 3e38 and
// 3e38 have a mean, but no sum. The terms are scaled before they are added, and the mean is scaled
// back. Host and CUDA use this only for such elements, so that all others keep their bits and their
// speed.
#pragma once

#include "kernels/params.hpp"

namespace longspan::kernels {

/// The factor of a term: in this unit even 2^32 of the largest numbers have a sum.
inline constexpr float kMergeUnit = 0x1p-32f;

/// Converts a mean of terms back from that unit. It is no larger than they are: if rounding carries
/// it past the largest number, it becomes that number.
LONGSPAN_HD inline float from_merge_unit(float mean) {
  constexpr float kMost = 0x1.fffffep127f * kMergeUnit;
  if (mean > kMost && mean < infinity()) mean = kMost;
  if (mean < -kMost && mean > -infinity()) mean = -kMost;
  return mean * (1.0f / kMergeUnit);
}

/// Element `column` of the merge of a row, before the result's scale. An infinity among the terms
/// stays one, as does a NaN. With `by_inverse` the sum divides as in CUDA's kernels of two parts.
LONGSPAN_HD inline float merge_scaled(const MergeOutputsParams& p, std::int64_t token, int head,
                                      int column, bool by_inverse = false) {
  Stats stats = empty_stats();
  float o = 0.0f;
  for (int part = 0; part < p.parts; ++part) {
    if (!p.is_there(part, token)) continue;
    const Stats next = p.stats_of(p.lse_of(part, token, head), token);
    if (is_empty(next)) continue;
    const float value = load_element(p.row_of(part, token, head), p.dtype_of(part), column);
    const Fold f = fold(stats, next, p.base);
    o = f(o, value * kMergeUnit * p.scale_of(part));
    stats = f.stats;
  }
  const Finish finished = finish(stats);
  if (by_inverse && finished.sum != 0.0f) return from_merge_unit(o * (1.0f / finished.sum));
  return from_merge_unit(finished(o));
}

}  // namespace longspan::kernels
