// Instances for long bf16 queries in pages or any layout, with biases or scales, on any GPU from
// sm_80 on.
#include "kernels/cuda/common/dims.hpp"
#include "kernels/cuda/portable/attend_portable.cuh"

namespace longspan::kernels::cuda {

KernelShape portable_bf16_any16(int dim, bool invariant) {
  return for_general_dim(dim, [&](auto size) {
    constexpr int kDim = decltype(size)::value;
    return invariant ? portable_shape<__nv_bfloat16, kDim, true, Loader::any16>()
                     : portable_shape<__nv_bfloat16, kDim, false, Loader::any16>();
  });
}

}  // namespace longspan::kernels::cuda
