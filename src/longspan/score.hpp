/// \file
/// How a score is made from a raw product q.k, before the softmax, in this order: scale, softcap,
/// ALiBi, qq_bias. Scores are in base 2. Host and CUDA run these same functions, so that their
/// meaning cannot drift; a kernel may write the same arithmetic for vectors.
#pragma once

#include <cmath>
#include <cstdint>

#include "longspan/score_terms.hpp"
#include "longspan/state.hpp"
#include "longspan/types.hpp"

namespace longspan {

LONGSPAN_HD inline float Score::operator()(float product) const {
  if (softcap == 0.0f) return product * (scale * kLog2E);
  return softcap * kLog2E * ::tanhf(product * (scale / softcap));
}

/// The distance that a slope multiplies, for a query at position i and a key at position j. Both
/// positions may be counted from any origin.
template <class Int>
LONGSPAN_HD float alibi_distance(Alibi alibi, Int i, Int j, Int context_len) {
  if (alibi == Alibi::context) return static_cast<float>(j - context_len);
  if (alibi == Alibi::query) return static_cast<float>(i > j ? j - i : i - j);
  return j < i ? -::sqrtf(static_cast<float>(i - j)) : 0.0f;
}

LONGSPAN_HD inline float Bias::operator()(int sequence, int head, std::int64_t i, std::int64_t j,
                                          std::int64_t context_len) const {
  float sum = 0.0f;
  if (slopes) sum = slopes.of(sequence, head) * alibi_distance(alibi, i, j, context_len);
  if (qq) {
    const std::int64_t row = i - context_len, column = j - context_len;
    if (column >= 0 && column < qq.width && row < qq.width)
      sum += qq.values[row * qq.row_stride + column];
  }
  return sum * kLog2E;
}

}  // namespace longspan
