// Short fp16 queries.
#include "kernels/cuda/attend_decode.cuh"
#include "kernels/cuda/instances/dims.hpp"

namespace longspan::kernels::cuda {

KernelShape decode_fp16(int dim, std::int64_t rows) {
  return for_dim(dim, [&](auto size) {
    constexpr int kDim = decltype(size)::value;
    constexpr int kMany = kDim <= 128 ? 32 : 16;  // as many as registers allow
    return rows <= 8 ? decode_shape<__half, kDim, 8>() : decode_shape<__half, kDim, kMany>();
  });
}

}  // namespace longspan::kernels::cuda
