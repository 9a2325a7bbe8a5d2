// Short fp16 queries: fp8 keys and values.
#include "kernels/cuda/attend_decode_block.cuh"

namespace longspan::kernels::cuda {

KernelShape decode_fp16_any8(int dim, std::int64_t rows) {
  return block::decode_for<__half, Loader::any8>(dim, rows);
}

}  // namespace longspan::kernels::cuda
