// A block's shared memory in the simulator: the dynamic part, and variables of kernels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/simulated/thread.hpp"

namespace longspan::kernels::cuda::arch {

/// The beginning of the block's dynamic shared memory, at a multiple of kAlign bytes.
template <int kAlign>
std::byte* dynamic_shared(simulated::Site site = simulated::Site::current()) {
  std::byte* const memory = simulated::dynamic_shared();
  if (reinterpret_cast<std::uintptr_t>(memory) % kAlign != 0)
    simulated::fail("dynamic shared memory is not aligned as the kernel wants it", site);
  return memory;
}

/// The same under the name that kernels use: for pointers to std::byte.
template <int kAlign>
struct DynamicShared {
  operator std::byte*() const { return dynamic_shared<kAlign>(); }
};
inline constexpr DynamicShared<16> shared_by_16;
inline constexpr DynamicShared<128> shared_by_128;
inline constexpr DynamicShared<1024> shared_by_1024;

/// A variable of the block, not initialised. The same T and kId give the same variable.
template <class T, int kId = 0>
T& shared_variable() {
  static const char kKey = 0;
  return *static_cast<T*>(simulated::static_shared(&kKey, sizeof(T), alignof(T)));
}

}  // namespace longspan::kernels::cuda::arch
