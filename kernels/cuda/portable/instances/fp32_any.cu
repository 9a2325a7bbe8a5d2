// fp32 queries, short and long; pages of any layout, fp8, scales, biases.
#include "kernels/cuda/portable/attend_fp32.cuh"

namespace longspan::kernels::cuda {

KernelShape attend_fp32_any(int dim) {
  if (dim <= 64) return fp32_shape<64, false>();
  if (dim <= 128) return fp32_shape<128, false>();
  return fp32_shape<256, false>();
}

}  // namespace longspan::kernels::cuda
