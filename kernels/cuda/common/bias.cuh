// ALiBi and qq_bias on scores in registers. A key's column is its position minus the context
// length, the position of the sequence's first query. Kernels compute it once for each key of a
// tile, from the shard, and rows add the bias for it.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/cuda/common/view.cuh"
#include "longspan/score.hpp"

namespace longspan::kernels::cuda {

/// The column of a local key; any number for keys that no row may see. Sequences with a bias have
/// fewer than 2^31 keys.
__device__ inline int key_column(const Geometry& p, const Sequence& sequence, const View& view,
                                 std::int64_t local_key) {
  if (!view.any.contains(local_key)) return 0;
  const std::int64_t position =
      p.shard.for_sequence(sequence.index).position(local_key, sequence.kv_len);
  return static_cast<int>(position - sequence.context_len);
}

/// A row of the sequence's queries, as indexed over all ranks.
struct QueryRow {
  std::int64_t index;
  int head;
  int sequence;
};

__device__ inline QueryRow query_row(const Geometry& p, int sequence, const PackedRow& row) {
  return {p.query_index(sequence, row.token), row.head, sequence};
}

/// The bias of a row, which is added to its scores in base 2.
class RowBias {
 public:
  __device__ RowBias(const Bias& bias, const QueryRow& row)
      : bias_(bias),
        index_(static_cast<int>(row.index)),
        slope_(bias.slopes ? bias.slopes.of(row.sequence, row.head) * kLog2E : 0.0f) {}

  __device__ float alibi(int column) const {
    return slope_ * alibi_distance(bias_.alibi, index_, column, 0);
  }

  /// The matrix's entry, or 0 outside of it. It has no switch over types, because it is in unrolled
  /// loops.
  __device__ float qq(int column) const {
    const QqBias& qq = bias_.qq;
    if (column < 0 || column >= qq.width || index_ >= qq.width) return 0.0f;
    const std::int64_t at = index_ * qq.row_stride + column;
    if (qq.values.dtype == DType::fp32)
      return static_cast<const float*>(qq.values.data)[at] * kLog2E;
    const unsigned short bits = static_cast<const unsigned short*>(qq.values.data)[at];
    const float value = qq.values.dtype == DType::bf16 ? __uint_as_float(std::uint32_t{bits} << 16)
                                                       : __half2float(__ushort_as_half(bits));
    return value * kLog2E;
  }

  /// A bias of -inf hides the key, whatever its score.
  __device__ static float add(float score, float bias) {
    return bias == -infinity() ? bias : __fadd_rn(score, bias);
  }

 private:
  const Bias& bias_;
  int index_;
  float slope_;
};

}  // namespace longspan::kernels::cuda
