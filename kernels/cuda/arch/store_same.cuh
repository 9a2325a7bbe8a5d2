// Stores that several threads make.
#pragma once

namespace longspan::kernels::cuda::arch {

/// A store of a value that other threads may store too: the order does not matter. It is a plain
/// store; race detectors know it by its name.
template <class T>
__device__ inline void store_same(T& to, const T& value) {
  to = value;
}

}  // namespace longspan::kernels::cuda::arch
