/// \file
/// The terms of a score: the numbers and arrays that kernels make it from. score.hpp has the
/// arithmetic.
#pragma once

#include <cstdint>

#include "longspan/element.hpp"
#include "longspan/types.hpp"

namespace longspan {

/// The part that depends on the product alone.
struct Score {
  float scale = 1.0f;    ///< of the product, in natural units; usually 1 / sqrt(dim)
  float softcap = 0.0f;  ///< 0: off; else score = softcap * tanh(score / softcap)

  /// The score of a product q.k, in base 2.
  LONGSPAN_HD float operator()(float product) const;
};

/// Bias between the new tokens of a sequence, one matrix for all sequences: row = the query's index
/// in its sequence, column = key position - context_len; keys of the context have none. An entry of
/// -inf hides the key, so that a tree of draft tokens can be verified in one step.
struct QqBias {
  Floats values;                ///< [width, width]; null: off
  std::int64_t width = 0;       ///< at least the longest query
  std::int64_t row_stride = 0;  ///< in elements

  /// Whether it is on.
  LONGSPAN_HD explicit operator bool() const { return static_cast<bool>(values); }
};

/// ALiBi slopes in natural units: one for each head, or one for each sequence and head.
struct Slopes {
  Floats values;                     ///< [heads] or [batch, heads]; null: no ALiBi
  std::int64_t sequence_stride = 0;  ///< from one sequence to the next; 0: all have the same

  /// No ALiBi.
  Slopes() = default;
  /// Slopes of heads, or with a stride of sequences and heads.
  LONGSPAN_HD Slopes(const Floats& floats, std::int64_t stride = 0)  // NOLINT: floats are slopes
      : values(floats), sequence_stride(stride) {}

  /// Whether it is on.
  LONGSPAN_HD explicit operator bool() const { return static_cast<bool>(values); }
  /// The slope of a head of a sequence.
  LONGSPAN_HD float of(int sequence, int head) const {
    return values[sequence * sequence_stride + head];
  }
};

/// The slopes from a head on; none if `slopes` has none.
LONGSPAN_HD inline Slopes slopes_from(const Slopes& slopes, int head) {
  return {floats_from(slopes.values, head), slopes.sequence_stride};
}

/// The part that depends on the positions of query and key: i and j are positions in the sequence,
/// and context_len is the position of the sequence's first query, kv_len - q_len by default.
struct Bias {
  Slopes slopes;                 ///< of ALiBi
  Alibi alibi = Alibi::context;  ///< the distance that the slopes multiply
  QqBias qq;                     ///< between new tokens

  /// Whether there is anything to add.
  LONGSPAN_HD explicit operator bool() const { return slopes || qq; }

  /// The term added to the score, base 2.
  LONGSPAN_HD float operator()(int sequence, int head, std::int64_t i, std::int64_t j,
                               std::int64_t context_len) const;
};

}  // namespace longspan
