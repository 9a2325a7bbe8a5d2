// How kernels wait for counters of other ranks (PutFlags).
#pragma once

#include <cstdint>

#include "kernels/cuda/arch/peer.cuh"
#include "src/base/put_flags.hpp"

namespace longspan::kernels::cuda {

/// Waits until one of this rank's counters has come to `count`. What was written before it was
/// counted is seen behind this. An abort ends the wait: it makes counters higher than any count,
/// and sets a word that is read now and then. The word needs no call of the driver. The driver may
/// be busy until this kernel ends, as where another thread loads the code of the kernel behind it.
__device__ inline void await_count(const PutFlags& own, const std::uint64_t* counter,
                                   std::uint64_t count) {
  constexpr unsigned kLooks = 1024;  // the word is in the host's memory, which is slow to answer
  for (unsigned looks = 1; arch::load_acquire(counter) < count; ++looks)
    if (looks % kLooks == 0 && own.abort != nullptr && arch::load_relaxed(own.abort) != 0) return;
}

}  // namespace longspan::kernels::cuda
