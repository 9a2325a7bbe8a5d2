// Computes what the rows of a work tile see, contiguous in shared memory.
#pragma once

#include "kernels/cuda/common/view.cuh"

namespace longspan::kernels::cuda {

/// One thread for each of the kRows rows writes what the row sees. Rows past the last see what the
/// last one sees, so that the first and the last entry bound the whole tile.
template <int kRows>
__device__ __forceinline__ void find_row_views(Interval* views, const AttendParams& p,
                                               const Sequence& sequence, const TileCoord& work) {
  if (threadIdx.x < kRows) {
    const int row = min(static_cast<int>(threadIdx.x), work.rows - 1);
    views[threadIdx.x] = row_view(p, sequence, packed_row(work, row).token, work.split);
  }
}

}  // namespace longspan::kernels::cuda
