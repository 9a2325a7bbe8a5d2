// Instances for long bf16 queries on any GPU from sm_80 on.
#include "kernels/cuda/common/dims.hpp"
#include "kernels/cuda/portable/attend_portable.cuh"

namespace longspan::kernels::cuda {

KernelShape portable_bf16(int dim, bool invariant, Loader loader) {
  if (loader == Loader::any16) return portable_bf16_any16(dim, invariant);
  if (loader == Loader::any8) return portable_bf16_any8(dim, invariant);
  return for_dim(dim, [&](auto size) {
    constexpr int kDim = decltype(size)::value;
    return invariant ? portable_shape<__nv_bfloat16, kDim, true, Loader::plain>()
                     : portable_shape<__nv_bfloat16, kDim, false, Loader::plain>();
  });
}

}  // namespace longspan::kernels::cuda
