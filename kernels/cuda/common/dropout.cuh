// Dropout of weights in registers (kernels/dropout.hpp). Kernels drop a weight after it was added
// to its row's sum, which has all weights.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/bias.cuh"
#include "kernels/cuda/common/view.cuh"
#include "kernels/dropout.hpp"

namespace longspan::kernels::cuda {

/// The factors of one row's keys.
class RowDropout {
 public:
  __device__ RowDropout(const AttendParams& p, PhiloxKey key, const Sequence& sequence,
                        const PackedRow& row)
      : dropout_(p.dropout),
        context_len_(sequence.context_len),
        row_(p.dropout.row(key, sequence.index, row.head,
                           sequence.context_len + p.query_index(sequence.index, row.token))) {}

  /// Drops, or scales, the weight of the key of a column (key_column).
  __device__ void drop(float& weight, int column) const {
    weight =
        dropout_.keeps(row_.one(context_len_ + column)) ? __fmul_rn(weight, dropout_.scale) : 0.0f;
  }
  /// Whether it drops two keys, which mostly share their words: bits 0 and 1.
  __device__ std::uint32_t drops(int first_column, int second_column) const {
    const std::int64_t a = context_len_ + first_column, b = context_len_ + second_column;
    const PhiloxWords words = row_.four(a / 4);
    const std::uint32_t second = b / 4 == a / 4 ? words.of(b) : row_.one(b);
    return (dropout_.keeps(words.of(a)) ? 0u : 1u) | (dropout_.keeps(second) ? 0u : 2u);
  }

 private:
  const Dropout& dropout_;
  const std::int64_t context_len_;
  const DropoutRow row_;
};

}  // namespace longspan::kernels::cuda
