// Instances for fp32 queries, short and long, with pages of any layout, fp8, scales and biases.
// They also serve heads wider than 256 of any type.
#include "kernels/cuda/portable/attend_fp32.cuh"
#include "longspan/limits.hpp"

namespace longspan::kernels::cuda {

KernelShape attend_fp32_any(int dim) {
  if (dim <= 64) return fp32_shape<64, false>();
  if (dim <= 128) return fp32_shape<128, false>();
  if (dim <= 256) return fp32_shape<256, false>();
  return fp32_shape<kMaxHeadDim, false, kMaxValueDim, 16>();
}

}  // namespace longspan::kernels::cuda
