// Stores that several threads make.
#pragma once

namespace longspan::kernels::cuda::arch {

/// A store that other threads may be making too, of the same value: whoever comes last changes
/// nothing. It is a plain store; race detectors know it by its name.
template <class T>
__device__ inline void store_same(T& to, const T& value) {
  to = value;
}

}  // namespace longspan::kernels::cuda::arch
