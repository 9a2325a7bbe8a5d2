/// \file
/// What makes a score of a raw product q.k, before the softmax, in this order: scale, softcap,
/// ALiBi, qq_bias. Scores are in base 2. Host and CUDA run these same functions, so that their
/// meaning cannot drift; a kernel may write the same arithmetic for vectors.
#pragma once

#include <cmath>

#include "longspan/element.hpp"
#include "longspan/state.hpp"
#include "longspan/types.hpp"

namespace longspan {

/// The part that depends on the product alone.
struct Score {
  float scale = 1.0f;    ///< of the product, in natural units; usually 1 / sqrt(dim)
  float softcap = 0.0f;  ///< 0: off; else score = softcap * tanh(score / softcap)

  /// The score of a product q.k, in base 2.
  LONGSPAN_HD float operator()(float product) const {
    if (softcap == 0.0f) return product * (scale * kLog2E);
    return softcap * kLog2E * ::tanhf(product * (scale / softcap));
  }
};

/// Bias between the new tokens of a sequence, one matrix for all sequences: row = the query's index
/// in its sequence, column = key position - context_len; keys of the context have none. An entry of
/// -inf hides the key: that is how a tree of draft tokens is verified in one step.
struct QqBias {
  Floats values;                ///< [width, width]; null: off
  std::int64_t width = 0;       ///< at least the longest query
  std::int64_t row_stride = 0;  ///< in elements

  /// Whether there is one.
  LONGSPAN_HD explicit operator bool() const { return static_cast<bool>(values); }
};

/// The part that depends on where query and key stand: i and j are positions in the sequence,
/// context_len = kv_len - q_len, the position of the sequence's first query.
struct Bias {
  Floats slopes;                 ///< [heads], natural units; null: no ALiBi
  Alibi alibi = Alibi::context;  ///< what the slopes multiply
  QqBias qq;                     ///< between new tokens

  /// Whether there is anything to add.
  LONGSPAN_HD explicit operator bool() const { return slopes || qq; }

  /// What is added to the score, base 2.
  LONGSPAN_HD float operator()(int head, std::int64_t i, std::int64_t j,
                               std::int64_t context_len) const {
    float sum = 0.0f;
    if (slopes) {
      const std::int64_t distance = alibi == Alibi::context ? j - context_len
                                    : i > j                 ? j - i
                                                            : i - j;
      sum = slopes[head] * static_cast<float>(distance);
    }
    if (qq) {
      const std::int64_t row = i - context_len, column = j - context_len;
      if (column >= 0 && column < qq.width && row < qq.width)
        sum += qq.values[row * qq.row_stride + column];
    }
    return sum * kLog2E;
  }
};

}  // namespace longspan
