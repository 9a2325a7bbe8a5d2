// Instances for long fp16 queries on fp8 keys and values, on any GPU from sm_80 on.
#include "kernels/cuda/common/dims.hpp"
#include "kernels/cuda/portable/attend_portable.cuh"

namespace longspan::kernels::cuda {

KernelShape portable_fp16_any8(int dim, bool invariant) {
  return for_general_dim(dim, [&](auto size) {
    constexpr int kDim = decltype(size)::value;
    return invariant ? portable_shape<__half, kDim, true, Loader::any8>()
                     : portable_shape<__half, kDim, false, Loader::any8>();
  });
}

}  // namespace longspan::kernels::cuda
