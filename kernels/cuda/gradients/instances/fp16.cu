// Instances of backward in products of fp16.
#include "kernels/cuda/gradients/mma_16bit.cuh"

namespace longspan::kernels::cuda {

GradientKernel gradients_fp16(bool rows_own, int dim) {
  return gradients_16bit<__half>(rows_own, dim);
}

}  // namespace longspan::kernels::cuda
