// Short queries of any type over e4m3 keys and values.
#include "kernels/cuda/decode/attend_decode.cuh"

namespace longspan::kernels::cuda {

KernelShape decode_e4m3(int dim, std::int64_t rows) {
  return decode_for<__nv_fp8_e4m3, Loader::any8>(dim, rows);
}

}  // namespace longspan::kernels::cuda
