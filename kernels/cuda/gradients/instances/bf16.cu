// Instances of backward in products of bf16.
#include "kernels/cuda/gradients/mma_16bit.cuh"

namespace longspan::kernels::cuda {

GradientKernel gradients_bf16(bool rows_own, int dim) {
  return gradients_16bit<__nv_bfloat16>(rows_own, dim);
}

}  // namespace longspan::kernels::cuda
