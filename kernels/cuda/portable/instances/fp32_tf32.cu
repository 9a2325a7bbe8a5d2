// Instances for fp32 queries, short and long, with products of tf32, over rows and pages of any
// layout, fp8, scales and biases.
#include "kernels/cuda/portable/attend_tf32.cuh"

namespace longspan::kernels::cuda {

KernelShape attend_fp32_tf32(int dim) {
  if (dim <= 64) return tf32_shape<64>();
  if (dim <= 128) return tf32_shape<128>();
  return tf32_shape<256>();
}

}  // namespace longspan::kernels::cuda
