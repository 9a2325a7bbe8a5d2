// Short bf16 queries over keys and values of the same type.
#include "kernels/cuda/decode/attend_decode.cuh"

namespace longspan::kernels::cuda {

KernelShape decode_bf16(int dim, std::int64_t rows, Loader loader) {
  if (loader == Loader::any16) return decode_bf16_any16(dim, rows);
  return decode_for<__nv_bfloat16, Loader::plain>(dim, rows);
}

}  // namespace longspan::kernels::cuda
