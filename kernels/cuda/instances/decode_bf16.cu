// Short bf16 queries.
#include "kernels/cuda/attend_decode.cuh"
#include "kernels/cuda/instances/dims.hpp"

namespace longspan::kernels::cuda {

KernelShape decode_bf16(int dim, std::int64_t rows) {
  return for_dim(dim, [&](auto size) {
    constexpr int kDim = decltype(size)::value;
    constexpr int kMany = kDim <= 128 ? 32 : 16;  // as many as registers allow
    return rows <= 8 ? decode_shape<__nv_bfloat16, kDim, 8>()
                     : decode_shape<__nv_bfloat16, kDim, kMany>();
  });
}

}  // namespace longspan::kernels::cuda
