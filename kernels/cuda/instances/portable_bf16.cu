// Long bf16 queries on any GPU from sm_80 on.
#include "kernels/cuda/attend_portable.cuh"
#include "kernels/cuda/instances/dims.hpp"

namespace longspan::kernels::cuda {

KernelShape portable_bf16(int dim, bool invariant) {
  return for_dim(dim, [&](auto size) {
    constexpr int kDim = decltype(size)::value;
    return invariant ? portable_shape<__nv_bfloat16, kDim, true>()
                     : portable_shape<__nv_bfloat16, kDim, false>();
  });
}

}  // namespace longspan::kernels::cuda
