// Instances for fp32 queries, short and long, with plain rows.
#include "kernels/cuda/portable/attend_fp32.cuh"

namespace longspan::kernels::cuda {

KernelShape attend_fp32(int dim, Loader loader) {
  if (loader != Loader::plain) return attend_fp32_any(dim);
  if (dim <= 64) return fp32_shape<64, true>();
  if (dim <= 128) return fp32_shape<128, true>();
  return fp32_shape<256, true>();
}

}  // namespace longspan::kernels::cuda
