// Stores that several threads make, in the simulator: they do not race with each other, nor with
// reads, which get the same value from any of them.
#pragma once

#include <cstring>

#include "kernels/cuda/arch/target.cuh"
#include "kernels/simulated/thread.hpp"

namespace longspan::kernels::cuda::arch {

template <class T>
inline void store_same(T& to, const T& value) {
  simulated::store_quietly(&to, &value, sizeof(T), kTarget >= 900);
}

}  // namespace longspan::kernels::cuda::arch
