// The kernels around the gradients of an attention, for host code.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/gradient_params.hpp"
#include "src/base/check.hpp"

namespace longspan::kernels::cuda {

/// Loads the code of a kernel (GradientKernels::load_gradients says why).
template <class... Parameters>
void load_code(void (*kernel)(Parameters...)) {
  cudaFuncAttributes attributes{};
  LONGSPAN_CUDA(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)));
}
/// That of the kernels of sums.cu, row_terms.cu and biases.cu.
void load_sums();
void load_row_terms();
void load_bias_gradients();

void row_terms(const RowTermParams& params, cudaStream_t stream);
void sink_gradients(const SinkGradientParams& params, cudaStream_t stream);
void widen_gradients(const WidenGradientsParams& params, cudaStream_t stream);
void clear_sums(float* sums, std::int64_t count, cudaStream_t stream);
/// `count` is a multiple of 16, and both are aligned to 16 bytes.
void add_sums(float* to, const float* from, std::int64_t count, cudaStream_t stream);
void add_to_first_columns(const AddColumnsParams& params, cudaStream_t stream);
void turn_back_sums(const TurnBackParams& params, cudaStream_t stream);
void turn_back_keys(const TurnBackKeysParams& params, cudaStream_t stream);
void store_gradients(const StoreGradientParams& params, cudaStream_t stream);

}  // namespace longspan::kernels::cuda
