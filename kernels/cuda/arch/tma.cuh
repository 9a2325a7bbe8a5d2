// Barriers: among some of a block's warps, and those that copies complete (mbarrier, sm_80). Also
// Hopper's TMA (sm_90). Nothing here depends on attention.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/cuda/arch/sm80.cuh"

namespace longspan::kernels::cuda::arch {

// ---- mbarriers: a phase completes after all arrivals and all announced bytes -----------------

struct Barrier {
  std::uint64_t word;

  __device__ void init(int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(this)), "r"(arrivals));
  }
  __device__ void arrive() {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(this)) : "memory");
  }
  /// Arrives, and announces `bytes` that copies will deliver before the phase completes.
  __device__ void arrive_expecting(int bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)),
        "r"(bytes)
        : "memory");
  }
  /// Waits until the phase of this parity is complete. On a fresh barrier parity 1 is complete.
  __device__ void wait(std::uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred complete;\n"
        "again:\n"
#if __CUDA_ARCH__ >= 900
        "mbarrier.try_wait.parity.shared::cta.b64 complete, [%0], %1;\n"
#else
        "mbarrier.test_wait.parity.shared.b64 complete, [%0], %1;\n"
#endif
        "@!complete bra again;\n"
        "}\n" ::"r"(shared_address(this)),
        "r"(parity)
        : "memory");
  }
};

/// Adds an arrival to the current phase, which occurs when the copies (copy_async) that this thread
/// has queued so far have completed.
__device__ inline void expect_copies(Barrier& barrier) {
  asm volatile("cp.async.mbarrier.arrive.shared.b64 [%0];" ::"r"(shared_address(&barrier))
               : "memory");
}

/// Makes this thread's writes to global memory visible to TMA too, once the threads have
/// synchronised.
__device__ inline void publish_to_tma() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}

/// Makes freshly initialised mbarriers visible to TMA, if there is one; a barrier of the threads
/// that use them must follow.
__device__ inline void publish_barriers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// ---- named barriers of the block (0 is __syncthreads) -----------------------------------------

__device__ inline void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- TMA -------------------------------------------------------------------------------------

enum class Keep { first_to_go, last_to_go };  // L2 eviction priority of data that is read

template <Keep kKeep>
__device__ inline std::uint64_t cache_policy() {
  std::uint64_t policy;
  if constexpr (kKeep == Keep::first_to_go)
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  else
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ inline void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/// Loads the map's box at (x, y, z), innermost first, into shared memory; its bytes count on
/// `barrier`. Elements outside the tensor arrive as zeros.
__device__ inline void load_box(void* to, const CUtensorMap* map, int x, int y, int z,
                                Barrier* barrier, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(to)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

/// The same for a map of five dimensions, for data that is read once.
__device__ inline void load_box(std::uint32_t to, const CUtensorMap* map, int x, int y, int z,
                                int w, int v, Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v), "r"(shared_address(barrier))
      : "memory");
}

}  // namespace longspan::kernels::cuda::arch
