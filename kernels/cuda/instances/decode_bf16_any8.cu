// Short bf16 queries: fp8 keys and values.
#include "kernels/cuda/attend_decode_block.cuh"

namespace longspan::kernels::cuda {

KernelShape decode_bf16_any8(int dim, std::int64_t rows) {
  return block::decode_for<__nv_bfloat16, Loader::any8>(dim, rows);
}

}  // namespace longspan::kernels::cuda
