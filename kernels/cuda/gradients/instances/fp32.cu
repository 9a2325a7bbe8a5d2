// Instances of backward in products of fp32, for tensors of any type.
#include "kernels/cuda/gradients/fp32.cuh"

namespace longspan::kernels::cuda {

GradientKernel gradients_fp32(bool rows_own, int dim) {
  if (dim <= 64)
    return rows_own ? gradient_kernel<Fp32Gradients<true, 64>>()
                    : gradient_kernel<Fp32Gradients<false, 64>>();
  return rows_own ? gradient_kernel<Fp32Gradients<true, 128>>()
                  : gradient_kernel<Fp32Gradients<false, 128>>();
}

}  // namespace longspan::kernels::cuda
