// How a merged row ends on CUDA, once for every kernel that ends one: sink, division, scale, then
// the one rounding.
#pragma once

#include "kernels/cuda/convert.cuh"
#include "kernels/cuda/fold_tree.cuh"
#include "kernels/params.hpp"

namespace longspan::kernels::cuda {

/// The state's columns become the result's, in place; gives the lse.
template <int kColumns>
__device__ float finish_piece(const MergeParams& m, int head, Piece<kColumns>& state) {
  if (m.sinks) {
    const Fold fold = longspan::fold(state.stats, sink_stats(m.sinks[head]));
    state.stats = fold.stats;
#pragma unroll
    for (float& o : state.o) o = fold(o, 0.0f);
  }
  const Finish finished = finish(state.stats);
#pragma unroll
  for (float& o : state.o) o = finished(o);
  LoadedScale(m.out_scale).apply(state.o);
  return finished.lse;
}

/// Rounds and stores; `wide`: the place is aligned for kColumns elements at a time.
template <int kColumns>
__device__ void store_result(const MergeParams& m, std::int64_t token, int head, int column,
                             const float (&values)[kColumns], float lse, bool wide) {
  const std::int64_t at = token * m.out.row_stride + head * m.out.head_stride + column;
  if (wide) {
    store_elements(m.out.data, m.dtype, at, values);
  } else {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const float one[1] = {values[i]};
      store_elements(m.out.data, m.dtype, at + i, one);
    }
  }
  if (m.lse != nullptr && column == 0)
    m.lse[token * m.lse_row_stride + head * m.lse_head_stride] = lse;
}

}  // namespace longspan::kernels::cuda
