// Short fp16 queries over keys and values of the same type.
#include "kernels/cuda/decode/attend_decode.cuh"

namespace longspan::kernels::cuda {

KernelShape decode_fp16(int dim, std::int64_t rows, Loader loader) {
  if (loader == Loader::any16) return decode_fp16_any16(dim, rows);
  return decode_for<__half, Loader::plain>(dim, rows);
}

}  // namespace longspan::kernels::cuda
