// How kernels wait for counters of other ranks (PutFlags).
#pragma once

#include <cstdint>

#include "kernels/cuda/arch/peer.cuh"
#include "src/base/put_flags.hpp"

namespace longspan::kernels::cuda {

/// Waits until a counter has reached `count`. Writes made before the increment are visible after
/// this. An abort ends the wait, because it sets counters higher than any count.
__device__ inline void await_count(const std::uint64_t* counter, std::uint64_t count) {
  while (arch::load_acquire(counter) < count) {
  }
}

/// The same for one of this rank's counters, by a kernel that the host may wait for: CUDA may load
/// the code of the next kernel only when this one has ended. An abort sets counters by a call of
/// the driver, which may be busy with that load. So this also reads the abort word now and then.
/// (The Hopper attention does not: it would spill more registers.)
__device__ inline void await_count(const PutFlags& own, const std::uint64_t* counter,
                                   std::uint64_t count) {
  constexpr unsigned kLooks = 1024;  // the word is in host memory, which is slow to read
  for (unsigned looks = 1; arch::load_acquire(counter) < count; ++looks)
    if (looks % kLooks == 0 && own.abort != nullptr && arch::load_relaxed(own.abort) != 0) return;
}

}  // namespace longspan::kernels::cuda
