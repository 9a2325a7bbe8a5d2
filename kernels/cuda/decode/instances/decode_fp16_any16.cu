// Short fp16 queries: pages of any layout, scales, biases.
#include "kernels/cuda/decode/attend_decode.cuh"

namespace longspan::kernels::cuda {

KernelShape decode_fp16_any16(int dim, std::int64_t rows) {
  return decode_for<__half, Loader::any16>(dim, rows);
}

}  // namespace longspan::kernels::cuda
