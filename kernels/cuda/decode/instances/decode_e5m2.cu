// Short queries of any type over e5m2 keys and values.
#include "kernels/cuda/decode/attend_decode.cuh"

namespace longspan::kernels::cuda {

KernelShape decode_e5m2(int dim, std::int64_t rows) {
  return decode_for<__nv_fp8_e5m2, Loader::any8>(dim, rows);
}

}  // namespace longspan::kernels::cuda
