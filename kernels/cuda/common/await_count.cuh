// How kernels wait for counters of other ranks (PutFlags).
#pragma once

#include <cstdint>

#include "kernels/cuda/arch/peer.cuh"

namespace longspan::kernels::cuda {

/// Waits until a counter has come to `count`. What was written before it was counted is seen behind
/// this. The wait ends by an abort, which makes counters higher than any count.
__device__ inline void await_count(const std::uint64_t* counter, std::uint64_t count) {
  while (arch::load_acquire(counter) < count) {
  }
}

}  // namespace longspan::kernels::cuda
