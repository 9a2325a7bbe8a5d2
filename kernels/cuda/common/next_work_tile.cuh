// How a block of a persistent kernel gets its next work tile (view.cuh).
#pragma once

#include "kernels/cuda/common/view.cuh"

namespace longspan::kernels::cuda {

/// The index of the work tile that the block takes after `index`. All its threads call this; `slot`
/// is in shared memory.
__device__ inline int next_work(const WorkPlan& plan, int index, int* slot) {
  const int blocks = static_cast<int>(gridDim.x);
  if (plan.ticket == nullptr) return index + blocks;
  __syncthreads();
  if (threadIdx.x == 0) *slot = blocks + atomicAdd(plan.ticket, 1);
  __syncthreads();
  return *slot;
}

}  // namespace longspan::kernels::cuda
