// fp32 queries, short and long, products of tf32; rows and pages of any layout, fp8, scales,
// biases.
#include "kernels/cuda/portable/attend_tf32.cuh"

namespace longspan::kernels::cuda {

KernelShape attend_fp32_tf32(int dim) {
  if (dim <= 64) return tf32_shape<64>();
  if (dim <= 128) return tf32_shape<128>();
  return tf32_shape<256>();
}

}  // namespace longspan::kernels::cuda
