// A thread's position in a ring of stages that others fill or empty.
#pragma once

#include <cstdint>

namespace longspan::kernels::cuda {

/// A stage, and the parity of its barriers, if it has any, in this round (the name is CUTLASS's).
template <int kStages>
struct PipelineState {
  int stage = 0;
  std::uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace longspan::kernels::cuda
