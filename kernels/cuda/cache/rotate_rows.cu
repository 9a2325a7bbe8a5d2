// Rotates query rows by their positions (longspan/rope.hpp). A block takes a row of the batch. A
// thread takes the same columns of several heads, so that it makes their rotations once.
#include <algorithm>

#include "kernels/batch_rows.hpp"
#include "kernels/cuda/cache/rotate.cuh"
#include "kernels/cuda/combine/merge.hpp"
#include "kernels/cuda/common/launch.hpp"

namespace longspan::kernels::cuda {
namespace {

constexpr int kThreads = 256;

template <int kCount>
__global__ __launch_bounds__(kThreads) void rotate_rows_kernel(
    const __grid_constant__ RotateParams p) {
  const std::int64_t token = blockIdx.x;
  const int b = sequence_of_row(p.geometry.batch, token);
  if (b < 0) return;
  const DType dtype = p.geometry.q_dtype;
  const std::int64_t position = p.position(b, token);
  const int thread = static_cast<int>(threadIdx.x), pieces = p.geometry.head_dim / kCount;
  const int width = pieces < kThreads ? pieces : kThreads, heads = kThreads / width;
  if (thread >= heads * width) return;
  for (int piece = thread % width; piece < pieces; piece += width) {
    const Rotations<kCount> rotations(p.rope, position, piece * kCount);
    for (int head = thread / width; head < p.geometry.heads; head += heads) {
      const std::int64_t from = p.from.offset(token, head);
      float values[kCount];
      load_values(p.from.data, dtype, from + rotations.column, values);
      rotations.apply(p.from.data, dtype, from, values);
      store_elements(p.to.data, dtype, p.to.offset(token, head) + rotations.column, values);
    }
  }
}

/// Whether eight elements are adjacent, and aligned, at both ends.
bool is_wide(const RotateParams& p) {
  const DType dtype = p.geometry.q_dtype;
  return p.geometry.head_dim % kVector == 0 && is_aligned<kVector>(p.from, dtype) &&
         is_aligned<kVector>(p.to, dtype);
}

}  // namespace

void rotate_rows(const RotateParams& p, cudaStream_t stream) {
  if (p.geometry.tokens == 0) return;
  const LaunchConfig how{static_cast<unsigned>(p.geometry.tokens), kThreads, stream};
  launch_kernel(is_wide(p) ? rotate_rows_kernel<kVector> : rotate_rows_kernel<1>, how, p);
}

}  // namespace longspan::kernels::cuda
