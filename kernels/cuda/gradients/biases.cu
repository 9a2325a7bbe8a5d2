// The gradients of biases, which rows of one head, or of all, add up to.
#include "kernels/cuda/arch/shared.cuh"
#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/gradients/gradients.hpp"

namespace longspan::kernels::cuda {
namespace {

constexpr int kThreads = 256;

/// A block takes a head. Sums of a sequence are float64, and so are those of all sequences that
/// share a slope.
__global__ void add_slope_gradients_kernel(const __grid_constant__ GradientParams p,
                                           const double* rows) {
  auto& parts = arch::shared_variable<double[kThreads]>();
  const int group = group_of(p), head = static_cast<int>(blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x);
  double all = 0;
  for (int b = 0; b < p.batch.size; ++b) {
    const std::int64_t count = p.batch.query_len(b, p.tokens);
    const double* const of_b =
        rows + (head / group * p.tokens + p.batch.first_row(b)) * group + head % group;
    double sum = 0;
    for (std::int64_t t = thread; t < count; t += kThreads) sum += of_b[t * group];
    __syncthreads();  // the last sequence's parts are read
    parts[thread] = sum;
    for (int half = kThreads / 2; half > 0; half /= 2) {
      __syncthreads();
      if (thread < half) parts[thread] += parts[thread + half];
    }
    if (thread > 0) continue;
    if (p.biases.slope_stride > 0)
      p.biases.slopes[b * p.biases.slope_stride + head] += static_cast<float>(parts[0]);
    all += parts[0];
  }
  if (thread == 0 && p.biases.slope_stride == 0) p.biases.slopes[head] += static_cast<float>(all);
}

}  // namespace

void add_slope_gradients(const GradientParams& p, const double* rows, cudaStream_t stream) {
  launch_kernel(add_slope_gradients_kernel,
                {dim3(static_cast<unsigned>(p.heads)), dim3(kThreads), stream}, p, rows);
}

}  // namespace longspan::kernels::cuda
