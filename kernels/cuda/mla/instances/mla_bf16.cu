// Short bf16 queries over latent keys of the same type.
#include "kernels/cuda/mla/attend_mla.cuh"

namespace longspan::kernels::cuda {

KernelShape mla_bf16(Family family) { return mla_for<__nv_bfloat16>(family); }

}  // namespace longspan::kernels::cuda
