// fp32 queries, short and long.
#include "kernels/cuda/attend_fp32.cuh"

namespace longspan::kernels::cuda {

KernelShape attend_fp32(int dim) {
  if (dim <= 64) return fp32_shape<64>();
  if (dim <= 128) return fp32_shape<128>();
  return fp32_shape<256>();
}

}  // namespace longspan::kernels::cuda
