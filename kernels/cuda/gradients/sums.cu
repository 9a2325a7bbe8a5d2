// Sums of gradients in fp32: cleared, added, turned back by RoPE, and stored with their one
// rounding. Only the device knows how many keys there are, so a thread asks for its row's sequence.
#include <algorithm>

#include "kernels/cuda/combine/run_headers.cuh"
#include "kernels/cuda/common/convert.cuh"
#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/gradients/sums.hpp"
#include "kernels/turn_back.hpp"

namespace longspan::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;

__global__ __launch_bounds__(kThreads) void add_sums_kernel(float4* to, const float4* from,
                                                            std::int64_t count) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  float4 sum = to[i];
  const float4 more = from[i];
  sum.x += more.x;
  sum.y += more.y;
  sum.z += more.z;
  sum.w += more.w;
  to[i] = sum;
}

/// A thread takes a column of a row of a kv head.
__global__ __launch_bounds__(kThreads) void add_columns_kernel(
    const __grid_constant__ AddColumnsParams p) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::int64_t row = i / p.from.dim;
  if (row >= p.from.rows * p.kv_heads) return;
  const int kv_head = static_cast<int>(row / p.from.rows);
  const std::int64_t at = row % p.from.rows, column = i % p.from.dim;
  p.to.at(kv_head, at)[column] += p.from.at(kv_head, at)[column];
}

/// Turns back `heads` rows at one position. A thread takes the same pairs of several heads, so that
/// it makes their rotations once.
template <class RowOf>
__device__ void turn_back_heads(const Rope& rope, std::int64_t position, int heads,
                                const RowOf& row_of) {
  const int thread = static_cast<int>(threadIdx.x), pairs = rope.dim / 2;
  const int width = pairs < kThreads ? pairs : kThreads, together = kThreads / width;
  if (thread >= together * width) return;
  for (int pair = thread % width; pair < pairs; pair += width) {
    const Rotation by = rope.at(position, pair);
    for (int head = thread / width; head < heads; head += together)
      turn_back(rope, pair, by, row_of(head));
  }
}

/// A block takes a row of the batch, all of its heads.
__global__ __launch_bounds__(kThreads) void turn_back_sums_kernel(
    const __grid_constant__ TurnBackParams p) {
  const Geometry& g = p.rows.geometry;
  const std::int64_t token = blockIdx.x;
  const int b = sequence_of_row(g.batch, token), group = g.heads / g.kv_heads;
  if (b < 0) return;
  turn_back_heads(p.rows.rope, p.rows.position(b, token), g.heads,
                  [&](int head) { return p.sums.at(head / group, token * group + head % group); });
}

/// A block takes a key, all of its heads.
__global__ __launch_bounds__(kThreads) void turn_back_keys_kernel(
    const __grid_constant__ TurnBackKeysParams p) {
  const std::int64_t row = blockIdx.x;
  const SummedKeys::Key key = p.keys.at(row);
  if (key.sequence < 0) return;
  turn_back_heads(p.rope, p.keys.position(key), p.kv_heads,
                  [&](int head) { return p.sums.at(head, row); });
}

/// A warp takes a row of a kv head; a thread kCount columns at a time.
template <int kCount>
__global__ __launch_bounds__(kThreads) void store_gradients_kernel(
    const __grid_constant__ StoreGradientParams p) {
  if (are_of_different_runs(p.headers)) return;
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (i >= p.count * p.kv_heads) return;
  const int kv_head = static_cast<int>(i / p.count);
  const std::int64_t row = i % p.count, place = p.place(row);
  if (place < 0) return;
  const float* const from = p.sums.at(kv_head, row);
  const std::int64_t to = p.to.offset(place / p.group, kv_head * p.group + place % p.group);
  for (int c = static_cast<int>(threadIdx.x) * kCount; c < p.sums.dim; c += kWarp * kCount) {
    float values[kCount];
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      // Which of the zeros a sum is must not depend on the zeros that were added to it.
      const float before = p.accumulate ? load_element(p.to.data, p.dtype, to + c + n) : 0.0f;
      values[n] = before + from[c + n];
    }
    store_elements(p.to.data, p.dtype, to + c, values);
  }
}

}  // namespace

void load_sums() {
  load_code(add_sums_kernel);
  load_code(add_columns_kernel);
  load_code(turn_back_sums_kernel);
  load_code(turn_back_keys_kernel);
  load_code(store_gradients_kernel<1>);
  load_code(store_gradients_kernel<4>);
}

void clear_sums(float* sums, std::int64_t count, cudaStream_t stream) {
  LONGSPAN_CUDA(cudaMemsetAsync(sums, 0, static_cast<std::size_t>(count) * sizeof(float), stream));
}

void add_sums(float* to, const float* from, std::int64_t count, cudaStream_t stream) {
  if (count == 0) return;
  const std::int64_t vectors = count / 4;
  launch_kernel(add_sums_kernel,
                {static_cast<unsigned>((vectors + kThreads - 1) / kThreads), kThreads, stream},
                reinterpret_cast<float4*>(to), reinterpret_cast<const float4*>(from), vectors);
}

void add_to_first_columns(const AddColumnsParams& p, cudaStream_t stream) {
  const std::int64_t count = p.from.rows * p.kv_heads * p.from.dim;
  if (count == 0) return;
  launch_kernel(add_columns_kernel,
                {static_cast<unsigned>((count + kThreads - 1) / kThreads), kThreads, stream}, p);
}

void turn_back_sums(const TurnBackParams& p, cudaStream_t stream) {
  if (p.rows.geometry.tokens == 0) return;
  launch_kernel(turn_back_sums_kernel,
                {static_cast<unsigned>(p.rows.geometry.tokens), kThreads, stream}, p);
}

void turn_back_keys(const TurnBackKeysParams& p, cudaStream_t stream) {
  if (p.sums.rows == 0) return;
  launch_kernel(turn_back_keys_kernel, {static_cast<unsigned>(p.sums.rows), kThreads, stream}, p);
}

void store_gradients(const StoreGradientParams& p, cudaStream_t stream) {
  const std::int64_t rows = p.count * p.kv_heads;
  if (rows == 0 && p.headers.digests == nullptr) return;
  const dim3 block(kWarp, kThreads / kWarp);
  // A rank without rows compares too.
  const std::int64_t blocks = std::max<std::int64_t>(1, (rows + block.y - 1) / block.y);
  const LaunchConfig how{static_cast<unsigned>(blocks), block, stream};
  const bool wide = p.sums.dim % 4 == 0 && is_aligned<4>(p.to, p.dtype);
  launch_kernel(wide ? store_gradients_kernel<4> : store_gradients_kernel<1>, how, p);
}

}  // namespace longspan::kernels::cuda
