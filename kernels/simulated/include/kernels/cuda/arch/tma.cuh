// Barriers of some of a block's warps, mbarriers, and Hopper's TMA, in the simulator.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/cuda/arch/sm80.cuh"
#include "kernels/simulated/tma.hpp"

namespace longspan::kernels::cuda::arch {

// ---- mbarriers: a phase completes after all arrivals and all announced bytes -----------------

struct Barrier {
  std::uint64_t word;

  void init(int arrivals, simulated::Site site = simulated::Site::current()) {
    constexpr int kMost = (1 << 20) - 1;
    if (arrivals < 1 || arrivals > kMost)
      simulated::fail("mbarrier.init for " + std::to_string(arrivals) + " arrivals", site);
    simulated::barrier_init(&word, arrivals, site);
  }
  void arrive(simulated::Site site = simulated::Site::current()) {
    simulated::barrier_arrive(&word, 0, site);
  }
  /// Arrives, and announces `bytes` that copies will deliver before the phase completes.
  void arrive_expecting(int bytes, simulated::Site site = simulated::Site::current()) {
    constexpr int kMost = (1 << 20) - 1;
    if (bytes < 0 || bytes > kMost)
      simulated::fail("mbarrier.arrive.expect_tx of " + std::to_string(bytes) + " bytes", site);
    simulated::barrier_arrive(&word, bytes, site);
  }
  /// Waits until the phase of this parity is complete. On a fresh barrier parity 1 is complete.
  void wait(std::uint32_t parity, simulated::Site site = simulated::Site::current()) {
    if (parity > 1) simulated::fail("mbarrier.try_wait: a parity is 0 or 1", site);
    simulated::barrier_wait(&word, parity, site);
  }
};

/// Adds an arrival to the current phase, which occurs when the copies (copy_async) that this thread
/// has queued so far have completed.
inline void expect_copies(Barrier& barrier, simulated::Site site = simulated::Site::current()) {
  simulated::barrier_expect_copies(&barrier.word, site);
}

/// Makes this thread's writes to global memory visible to TMA too, once the threads have
/// synchronised.
inline void publish_to_tma(simulated::Site site = simulated::Site::current()) {
  if constexpr (kTarget >= 900) simulated::fence_global_proxy(site);
}

/// The simulator's TMA sees freshly initialised mbarriers without a fence.
inline void publish_barriers() {}

// ---- named barriers of the block (0 is __syncthreads) -----------------------------------------

namespace named {

inline void check(int id, int threads, simulated::Site site) {
  if (id < 0 || id > 15) simulated::fail("barrier " + std::to_string(id) + " of 16", site);
  if (threads < 32 || threads > 1024 || threads % 32 != 0)
    simulated::fail("a barrier of " + std::to_string(threads) + " threads, not of whole warps",
                    site);
}

}  // namespace named

inline void named_sync(int id, int threads, simulated::Site site = simulated::Site::current()) {
  named::check(id, threads, site);
  simulated::block_barrier(id, threads, true, false, "bar.sync", site);
}
inline void named_arrive(int id, int threads, simulated::Site site = simulated::Site::current()) {
  named::check(id, threads, site);
  simulated::block_barrier(id, threads, false, false, "bar.arrive", site);
}

// ---- TMA -------------------------------------------------------------------------------------

enum class Keep { first_to_go, last_to_go };  // L2 eviction priority of data that is read

template <Keep kKeep>
std::uint64_t cache_policy() {
  return static_cast<std::uint64_t>(kKeep) + 1;
}

inline void prefetch_map(const CUtensorMap*) {}

/// Loads the map's box at (x, y, z), innermost first, into shared memory; its bytes count on
/// `barrier`. Elements outside the tensor arrive as zeros.
inline void load_box(void* to, const CUtensorMap* map, int x, int y, int z, Barrier* barrier,
                     std::uint64_t policy, simulated::Site site = simulated::Site::current()) {
  if (policy != cache_policy<Keep::first_to_go>() && policy != cache_policy<Keep::last_to_go>())
    simulated::fail("cp.async.bulk.tensor with a cache policy that cache_policy() did not make",
                    site);
  const int place[] = {x, y, z};
  simulated::load_box(shared_address(to, site), map, place, &barrier->word, site);
}

/// The same for a map of five dimensions, for data that is read once.
inline void load_box(std::uint32_t to, const CUtensorMap* map, int x, int y, int z, int w, int v,
                     Barrier* barrier, simulated::Site site = simulated::Site::current()) {
  const int place[] = {x, y, z, w, v};
  simulated::load_box(to, map, place, &barrier->word, site);
}

}  // namespace longspan::kernels::cuda::arch
