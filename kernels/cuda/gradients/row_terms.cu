// What backward needs of its rows: their terms, the gradients of sinks that follow from them, and
// dout in fp32.
//
// D of a row is one chain of fmas over its columns, in their order. So are the products dout.v of
// fp32, and where a row sees one key its out is v: dS is then 0 to the bit, as it must be.
#include "kernels/cuda/arch/shared.cuh"
#include "kernels/cuda/common/convert.cuh"
#include "kernels/cuda/common/divisor.hpp"
#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/gradients/sums.hpp"

namespace longspan::kernels::cuda {
namespace {

constexpr int kThreads = kSegment;  // rows of a block; a thread takes a row of each segment
constexpr int kWarp = 32;
constexpr int kColumns = 32;  // of a tile

/// A tile of rows. An odd stride spreads a column over the banks.
struct Tile {
  float out[kThreads][kColumns + 1];
  float dout[kThreads][kColumns + 1];
};

/// A warp loads rows, one after another; then a thread takes a row.
__global__ __launch_bounds__(kThreads) void row_terms_kernel(
    const __grid_constant__ RowTermParams p) {
  auto& tile = arch::shared_variable<Tile>();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp;
  const std::int64_t rows = p.tokens * p.heads;
  const std::int64_t first = std::int64_t{blockIdx.x} * kThreads;
  float sum = 0;
  for (int column = 0; column < p.value_dim; column += kColumns) {
    const int left = p.value_dim - column, count = left < kColumns ? left : kColumns;
    __syncthreads();  // the last tile has been read
    for (int r = thread / kWarp; r < kThreads && first + r < rows; r += kThreads / kWarp) {
      const std::int64_t token = (first + r) / p.heads, head = (first + r) % p.heads;
      if (lane >= count) continue;
      tile.out[r][lane] =
          load_element(p.out.data, p.out_dtype, p.out.offset(token, head) + column + lane);
      tile.dout[r][lane] =
          load_element(p.dout.data, p.dout_dtype, p.dout.offset(token, head) + column + lane);
    }
    __syncthreads();
    if (first + thread < rows)
      for (int c = 0; c < count; ++c) sum = fmaf(tile.dout[thread][c], tile.out[thread][c], sum);
  }
  const std::int64_t row = first + thread;
  if (row >= rows) return;
  const std::int64_t token = row / p.heads, head = row % p.heads;
  if (p.dlse.data != nullptr) sum -= *p.dlse.at(token, head);
  p.terms[row] = row_term(*p.lse.at(token, head), sum);
}

/// A tile of rows of 16 bits, in chunks of eight elements. A row of 144 bytes begins at other banks
/// than its seven neighbours.
struct ChunkTile {
  static constexpr int kChunks = 8;
  uint4 out[kThreads][kChunks + 1];
  uint4 dout[kThreads][kChunks + 1];
};

__device__ inline float2 widen(std::uint32_t pair, __nv_bfloat16) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}
__device__ inline float2 widen(std::uint32_t pair, __half) {
  return __half22float2(reinterpret_cast<const __half2&>(pair));
}

/// The same for rows of 16 bits that may be read in chunks: eight lanes load a row, and the loads
/// of a tile are all in flight.
template <class Element>
__global__ __launch_bounds__(kThreads) void row_terms_by_chunks_kernel(
    const __grid_constant__ RowTermParams p, const Divisor by_heads) {
  auto& tile = arch::shared_variable<ChunkTile>();
  constexpr int kChunks = ChunkTile::kChunks, kRowsOnce = kThreads / kChunks;
  const int thread = static_cast<int>(threadIdx.x), chunk = thread % kChunks;
  const int rows = static_cast<int>(p.tokens * p.heads);
  const int first = static_cast<int>(blockIdx.x) * kThreads;
  const int chunks = p.value_dim / 8;
  float sum = 0;
  for (int before = 0; before < chunks; before += kChunks) {
    __syncthreads();  // the tile before is free
    uint4 out[kChunks]{}, dout[kChunks]{};
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int row = first + thread / kChunks + i * kRowsOnce;
      if (row >= rows || before + chunk >= chunks) continue;
      const int token = row / by_heads, head = row - token * p.heads;
      out[i] = reinterpret_cast<const uint4*>(p.out.at<Element>(token, head))[before + chunk];
      dout[i] = reinterpret_cast<const uint4*>(p.dout.at<Element>(token, head))[before + chunk];
    }
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int row = thread / kChunks + i * kRowsOnce;
      tile.out[row][chunk] = out[i];
      tile.dout[row][chunk] = dout[i];
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (before + c >= chunks) break;
      const uint4 a = tile.dout[thread][c], b = tile.out[thread][c];
      const std::uint32_t left[] = {a.x, a.y, a.z, a.w}, right[] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x = widen(left[i], Element{}), y = widen(right[i], Element{});
        sum = fmaf(x.y, y.y, fmaf(x.x, y.x, sum));
      }
    }
  }
  const int row = first + thread;
  if (row >= rows) return;
  const int token = row / by_heads, head = row - token * p.heads;
  if (p.dlse.data != nullptr) sum -= *p.dlse.at(token, head);
  p.terms[row] = row_term(*p.lse.at(token, head), sum);
}

/// The sum over the threads of a block, in thread 0; a tree of one shape.
__device__ double block_sum(double mine) {
  auto& sums = arch::shared_variable<double[kThreads]>();
  const int thread = static_cast<int>(threadIdx.x);
  sums[thread] = mine;
  for (int width = kThreads / 2; width > 0; width /= 2) {
    __syncthreads();
    if (thread < width) sums[thread] += sums[thread + width];
  }
  const double sum = sums[0];  // which only thread 0 uses
  __syncthreads();             // the next sum may begin
  return sum;
}

/// A block takes a head. In the fixed order a thread takes the same row of every segment, so that
/// the sum of a virtual rank has one order, whatever ranks there are.
__global__ __launch_bounds__(kThreads) void sink_gradients_kernel(
    const __grid_constant__ SinkGradientParams p) {
  const int head = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const double sink = to_base_2(p.sinks[head]);
  if (!p.invariant) {
    double sum = 0;
    for (int b = 0; b < p.batch.size; ++b)
      for (std::int64_t t = thread; t < p.rows_of(b); t += kThreads)
        sum += p.part(sink, b, t, head);
    sum = block_sum(sum);
    if (thread == 0) p.to[head] = static_cast<float>(sum);
    return;
  }
  auto& leaves = arch::shared_variable<float[kVirtualRanks]>();
  const int count = p.order(0).leaves;
  for (int leaf = 0; leaf < count; ++leaf) {
    double sum = 0;
    for (int b = 0; b < p.batch.size; ++b) {
      const SegmentOrder order = p.order(b);
      const std::int64_t segments = order.count(leaf), rows = p.rows_of(b);
      for (std::int64_t s = 0; s < segments; ++s) {
        const std::int64_t t = order.segment(leaf, s) * kSegment + thread;
        if (t < rows) sum += p.part(sink, b, t, head);
      }
    }
    sum = block_sum(sum);
    if (thread == 0) leaves[leaf] = static_cast<float>(sum);
  }
  if (thread != 0) return;
  for (int apart = 1; apart < count; apart *= 2)  // neighbours first; counts are powers of two
    for (int leaf = 0; leaf < count; leaf += 2 * apart) leaves[leaf] += leaves[leaf + apart];
  p.to[head] = leaves[0];
}

/// A warp takes a row.
__global__ __launch_bounds__(kThreads) void widen_gradients_kernel(
    const __grid_constant__ WidenGradientsParams p) {
  const std::int64_t row = std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (row >= p.tokens * p.heads) return;
  const std::int64_t token = row / p.heads, head = row % p.heads;
  const std::int64_t from = p.dout.offset(token, head);
  for (int c = static_cast<int>(threadIdx.x); c < p.value_dim; c += kWarp)
    p.to[row * p.value_dim + c] = load_element(p.dout.data, p.dtype, from + c);
  if (threadIdx.x == 0) p.to_lse[row] = p.dlse.data != nullptr ? *p.dlse.at(token, head) : 0.0f;
}

unsigned blocks_for(std::int64_t rows, int of_block) {
  return static_cast<unsigned>((rows + of_block - 1) / of_block);
}

}  // namespace

void load_row_terms() {
  load_code(row_terms_kernel);
  load_code(row_terms_by_chunks_kernel<__nv_bfloat16>);
  load_code(row_terms_by_chunks_kernel<__half>);
  load_code(sink_gradients_kernel);
  load_code(widen_gradients_kernel);
}

void row_terms(const RowTermParams& p, cudaStream_t stream) {
  if (p.tokens == 0) return;
  const LaunchConfig how{blocks_for(p.tokens * p.heads, kThreads), kThreads, stream};
  const bool by_chunks = p.out_dtype == p.dout_dtype && p.value_dim % 8 == 0 &&
                         p.tokens * p.heads < std::int64_t{1} << 31 &&
                         is_aligned<8>(p.out, p.out_dtype) && is_aligned<8>(p.dout, p.out_dtype);
  const Divisor by_heads(static_cast<std::uint32_t>(p.heads));
  if (by_chunks && p.out_dtype == DType::bf16)
    launch_kernel(row_terms_by_chunks_kernel<__nv_bfloat16>, how, p, by_heads);
  else if (by_chunks && p.out_dtype == DType::fp16)
    launch_kernel(row_terms_by_chunks_kernel<__half>, how, p, by_heads);
  else
    launch_kernel(row_terms_kernel, how, p);
}

void sink_gradients(const SinkGradientParams& p, cudaStream_t stream) {
  launch_kernel(sink_gradients_kernel, {static_cast<unsigned>(p.heads), kThreads, stream}, p);
}

void widen_gradients(const WidenGradientsParams& p, cudaStream_t stream) {
  if (p.tokens == 0) return;
  const dim3 block(kWarp, kThreads / kWarp);
  launch_kernel(widen_gradients_kernel,
                {blocks_for(p.tokens * p.heads, kThreads / kWarp), block, stream}, p);
}

}  // namespace longspan::kernels::cuda
