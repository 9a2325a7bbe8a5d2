// Instances of backward in products of tf32.
#include "kernels/cuda/gradients/mma_tf32.cuh"

namespace longspan::kernels::cuda {

GradientKernel gradients_tf32(bool rows_own, int dim) {
  if (dim <= 64)
    return rows_own ? gradient_kernel<Tf32Gradients<true, 64>>()
                    : gradient_kernel<Tf32Gradients<false, 64>>();
  return rows_own ? gradient_kernel<Tf32Gradients<true, 128>>()
                  : gradient_kernel<Tf32Gradients<false, 128>>();
}

}  // namespace longspan::kernels::cuda
