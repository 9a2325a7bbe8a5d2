// The kernels of backward of the CUDA backend, for host code. An instance file defines kernels; the
// table of families in attend_gradients.cu chooses between them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "kernels/cuda/dispatch/gpu.hpp"
#include "kernels/cuda/gradients/plan.hpp"

namespace longspan::kernels::cuda {

/// A compiled kernel: that of dq, or that of dk and dv. Any grid does all the work.
struct GradientKernel {
  void (*kernel)(GradientParams, GradientPlan) = nullptr;
  int threads = 0;
  int shared_bytes = 0;
  int tile = 0;     // rows or keys that a block owns
  int columns = 0;  // of a panel
  int blocks = 0;   // on a multiprocessor
};

// Each instance file has one function. `dim` is rounded up to the next instance.
GradientKernel gradients_bf16(bool rows_own, int dim);
GradientKernel gradients_fp16(bool rows_own, int dim);
GradientKernel gradients_tf32(bool rows_own, int dim);
GradientKernel gradients_fp32(bool rows_own, int dim);

/// GradientKernels::stores_gradients.
bool stores_gradients(const GradientParams& p, const Gpu& gpu);

/// Adds up gradients: GradientKernels::attend_gradients.
void attend_gradients(const GradientParams& p, const Gpu& gpu, cudaStream_t stream);

/// The most scratch of attend_gradients within these bounds.
std::size_t gradient_scratch(const GradientParams& bounds, const Gpu& gpu);

// ---- gradients of biases (biases.cu) --------------------------------------------------------

/// Adds the sums of rows of each head, [kv_heads, tokens * group], to the gradients of slopes.
void add_slope_gradients(const GradientParams& p, const double* rows, cudaStream_t stream);

/// Adds up the gradients of qq_bias. Their products are of fp32, whatever those of the others are.
void add_qq_gradients(const GradientParams& p, cudaStream_t stream);

}  // namespace longspan::kernels::cuda
