// Short bf16 queries: pages of any layout, scales, biases.
#include "kernels/cuda/decode/attend_decode.cuh"

namespace longspan::kernels::cuda {

KernelShape decode_bf16_any16(int dim, std::int64_t rows) {
  return decode_for<__nv_bfloat16, Loader::any16>(dim, rows);
}

}  // namespace longspan::kernels::cuda
