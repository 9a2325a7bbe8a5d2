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

/// ALiBi slopes in natural units: one for each head, or one for each sequence and head.
struct Slopes {
  Floats values;                     ///< [heads] or [batch, heads]; null: no ALiBi
  std::int64_t sequence_stride = 0;  ///< from one sequence to the next; 0: all have the same

  /// None.
  Slopes() = default;
  /// Of heads, or with a stride of sequences and heads.
  LONGSPAN_HD Slopes(const Floats& floats, std::int64_t stride = 0)  // NOLINT: floats are slopes
      : values(floats), sequence_stride(stride) {}

  /// Whether there are any.
  LONGSPAN_HD explicit operator bool() const { return static_cast<bool>(values); }
  /// That of a head of a sequence.
  LONGSPAN_HD float of(int sequence, int head) const {
    return values[sequence * sequence_stride + head];
  }
};

/// The same from a head on; none where none are given.
LONGSPAN_HD inline Slopes slopes_from(const Slopes& slopes, int head) {
  return {floats_from(slopes.values, head), slopes.sequence_stride};
}

/// What a slope multiplies, for a query at position i and a key at position j. Positions may be
/// counted from anywhere.
template <class Int>
LONGSPAN_HD float alibi_distance(Alibi alibi, Int i, Int j, Int context_len) {
  if (alibi == Alibi::context) return static_cast<float>(j - context_len);
  if (alibi == Alibi::query) return static_cast<float>(i > j ? j - i : i - j);
  return j < i ? -::sqrtf(static_cast<float>(i - j)) : 0.0f;
}

/// The part that depends on where query and key stand: i and j are positions in the sequence,
/// context_len = kv_len - q_len, the position of the sequence's first query.
struct Bias {
  Slopes slopes;                 ///< of ALiBi
  Alibi alibi = Alibi::context;  ///< what the slopes multiply
  QqBias qq;                     ///< between new tokens

  /// Whether there is anything to add.
  LONGSPAN_HD explicit operator bool() const { return slopes || qq; }

  /// What is added to the score, base 2.
  LONGSPAN_HD float operator()(int sequence, int head, std::int64_t i, std::int64_t j,
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
};

}  // namespace longspan
