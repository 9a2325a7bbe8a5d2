// Short bf16 queries.
#include "kernels/cuda/attend_decode.cuh"
#include "kernels/cuda/instances/dims.hpp"

namespace longspan::kernels::cuda {

KernelShape decode_bf16(int dim, std::int64_t rows) {
  return for_dim(dim, [&](auto size) {
    constexpr int kDim = decltype(size)::value;
    return rows <= 8 ? decode_shape<__nv_bfloat16, kDim, 8>() : decode_shape<__nv_bfloat16, kDim, 32>();
  });
}

}  // namespace longspan::kernels::cuda
