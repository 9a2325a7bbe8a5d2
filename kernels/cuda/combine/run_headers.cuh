// Reads the ranks' reports of the run whose states, or finished parts, a kernel is about to merge.
#pragma once

#include "kernels/merge_params.hpp"

namespace longspan::kernels::cuda {

/// Whether the gathered data belongs to different runs. One thread of the grid then reports it: of
/// those with `reports`, the one in the first block. Nothing else may be written then.
__device__ inline bool are_of_different_runs(const RunHeaders& headers, bool reports) {
  if (headers.digests == nullptr) return false;
  const int other = headers.differing();
  if (other < 0) return false;
  if (blockIdx.x == 0 && reports) {
    *static_cast<volatile std::uint64_t*>(headers.report) =
        RunHeaders::reported(headers.run, other);
    __threadfence_system();
  }
  return true;
}
__device__ inline bool are_of_different_runs(const RunHeaders& headers) {
  return are_of_different_runs(headers, threadIdx.x == 0 && threadIdx.y == 0);
}

}  // namespace longspan::kernels::cuda
