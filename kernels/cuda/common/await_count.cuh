// How kernels wait for counters of other ranks (PutFlags).
#pragma once

#include <cstdint>

#include "kernels/cuda/arch/peer.cuh"
#include "src/base/put_flags.hpp"

namespace longspan::kernels::cuda {

/// Waits until one of this rank's counters has reached `count`. Writes made before the increment
/// are visible after this. An abort ends the wait: it sets counters higher than any count, and sets
/// a word that this reads now and then. The word needs no call of the driver, which may be busy
/// until this kernel ends: another thread may be loading the code of the next kernel.
__device__ inline void await_count(const PutFlags& own, const std::uint64_t* counter,
                                   std::uint64_t count) {
  constexpr unsigned kLooks = 1024;  // the word is in host memory, which is slow to read
  for (unsigned looks = 1; arch::load_acquire(counter) < count; ++looks)
    if (looks % kLooks == 0 && own.abort != nullptr && arch::load_relaxed(own.abort) != 0) return;
}

}  // namespace longspan::kernels::cuda
