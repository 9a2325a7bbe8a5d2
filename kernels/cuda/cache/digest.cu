// Computes the digest of small arrays (kernels/digest.hpp) in one block, and a rank's report of its
// run.
#include "kernels/cuda/cache/digest.hpp"

#include "kernels/cuda/arch/shared.cuh"
#include "kernels/cuda/common/launch.hpp"

namespace longspan::kernels::cuda {
namespace {

constexpr int kThreads = 256;

__global__ __launch_bounds__(kThreads) void digest_kernel(const __grid_constant__ DigestParams p) {
  auto& sum = arch::shared_variable<unsigned long long>();
  std::uint64_t all = 0;
  for (int n = 0; n < p.count; ++n) {
    if (threadIdx.x == 0) sum = 0;
    __syncthreads();
    const DigestArray& array = p.arrays[n];
    unsigned long long own = 0;
    for (std::int64_t i = threadIdx.x; i < array.size(); i += kThreads)
      own += mixed_element(i, array.bits(i));
    atomicAdd(&sum, own);  // integers have the same sum in any order
    __syncthreads();
    if (threadIdx.x == 0) {
      p.words[n] = sum;
      all += mixed_array(n, sum);
    }
    __syncthreads();
  }
  if (threadIdx.x > 0) return;
  p.words[p.count] = all;
  __threadfence_system();
  static_cast<volatile std::uint64_t*>(p.words)[p.count + 1] = p.stamp;
}

__global__ void run_digest_kernel(const __grid_constant__ RunDigestParams p) {
  *p.to = run_digest(p.hash, p.contents);
}

}  // namespace

void digest(const DigestParams& p, cudaStream_t stream) {
  launch_kernel(digest_kernel, {dim3(1), dim3(kThreads), stream}, p);
}

void write_run_digest(const RunDigestParams& p, cudaStream_t stream) {
  launch_kernel(run_digest_kernel, {dim3(1), dim3(1), stream}, p);
}

}  // namespace longspan::kernels::cuda
