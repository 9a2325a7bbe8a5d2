// Short fp16 queries over latent keys of the same type.
#include "kernels/cuda/mla/attend_mla.cuh"

namespace longspan::kernels::cuda {

KernelShape mla_fp16(Family family) { return mla_for<__half>(family); }

}  // namespace longspan::kernels::cuda
