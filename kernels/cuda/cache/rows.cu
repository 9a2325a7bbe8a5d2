// Computes positions of rows and keys if only the device knows lengths, by prefix sums over the
// batch with a block scan, a block of sequences at a time.
#include <algorithm>
#include <cub/block/block_scan.cuh>

#include "kernels/cuda/arch/overlap.cuh"
#include "kernels/cuda/arch/shared.cuh"
#include "kernels/cuda/combine/merge.hpp"
#include "kernels/cuda/common/launch.hpp"

namespace longspan::kernels::cuda {
namespace {

constexpr int kThreads = 256;
using Scan = cub::BlockScan<std::int64_t, kThreads>;

/// Computes, in one block, key_start[b] = keys of the sequences before b.
__global__ void key_starts_kernel(const __grid_constant__ KeyStartParams p) {
  auto& scan = arch::shared_variable<Scan::TempStorage>();
  std::int64_t before = 0;
  for (int first = 0; first < p.batch; first += kThreads) {
    const int b = first + static_cast<int>(threadIdx.x);
    std::int64_t start = b < p.batch ? p.shard.for_sequence(b).local_len(p.kv_len[b]) : 0;
    std::int64_t total;
    __syncthreads();
    Scan(scan).ExclusiveSum(start, start, total);
    if (b < p.batch) p.key_start[b] = before + start;
    before += total;
  }
}

/// Computes, in one block, start[b] = the rank's rows of the sequences before b.
__global__ void row_starts_kernel(const __grid_constant__ RowStartParams p) {
  auto& scan = arch::shared_variable<Scan::TempStorage>();
  std::int64_t before = 0;
  for (int first = 0; first < p.batch; first += kThreads) {
    const int b = first + static_cast<int>(threadIdx.x);
    std::int64_t start = 0, total;
    if (b < p.batch)
      start = p.shard.for_sequence(b).local_len(p.whole_start[b + 1] - p.whole_start[b]);
    __syncthreads();
    Scan(scan).ExclusiveSum(start, start, total);
    if (b < p.batch) p.start[b] = p.within(before + start);
    before += total;
  }
  if (threadIdx.x == 0) p.start[p.batch] = p.within(before);
}

__global__ void padded_key_starts_kernel(const __grid_constant__ KeyStartParams p) {
  const int b = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (b < p.batch) p.key_start[b] = b * p.capacity;
}

/// A thread takes a row of the map, and blockIdx.y is a rank. It finds the sequence that holds the
/// rank's i-th row among kThreads sequences at a time.
__global__ void map_rows_kernel(const __grid_constant__ MapParams p) {
  auto& scan = arch::shared_variable<Scan::TempStorage>();
  auto& starts = arch::shared_variable<std::int64_t[kThreads + 1]>();
  const Shard shard = p.shard.with_rank(p.first + static_cast<int>(blockIdx.y));
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  std::int64_t before = 0, row = -1;
  for (int first = 0; first < p.batch.size; first += kThreads) {
    const int b = first + static_cast<int>(threadIdx.x);
    std::int64_t start = b < p.batch.size ? shard.for_sequence(b).local_len(p.rows_of(b)) : 0;
    std::int64_t total;
    __syncthreads();  // the last round is done with `starts` and the scan's memory
    Scan(scan).ExclusiveSum(start, start, total);
    starts[threadIdx.x] = before + start;
    if (threadIdx.x == 0) starts[kThreads] = before + total;
    __syncthreads();
    before += total;
    if (row >= 0 || i < starts[0] || i >= starts[kThreads]) continue;
    const int own = last_start(kThreads, i, [&](int b) { return starts[b]; });
    row = p.row(shard, first + own, i - starts[own]);
  }
  if (i < p.capacity) p.map[blockIdx.y * p.capacity + i] = row;
}

/// Copies rows to their places. threadIdx.y is a row, threadIdx.x its words. `Word` divides rows
/// and addresses.
template <class Word>
__global__ void place_rows_kernel(const __grid_constant__ PlaceParams p) {
  arch::let_next_kernel_start();
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (i >= p.count) return;
  const std::int64_t row = p.map != nullptr ? p.map[i] : i;
  if (row < 0 || row >= p.places) return;
  const Word* from = reinterpret_cast<const Word*>(p.from + i * p.row_bytes);
  Word* to = reinterpret_cast<Word*>(p.to + row * p.row_bytes);
  const std::int64_t words = p.row_bytes / static_cast<std::int64_t>(sizeof(Word));
  for (std::int64_t c = threadIdx.x; c < words; c += blockDim.x) to[c] = from[c];
}

__global__ void cut_context_kernel(const __grid_constant__ ContextCutParams p) {
  const int b = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (b >= p.batch.size) return;
  const std::int64_t kv_len = p.batch.kv_len[b];
  const std::int64_t context = kv_len - p.batch.query_len(b, p.tokens);
  std::int64_t* range = p.ranges + std::int64_t{3} * b;
  range[0] = 0;
  range[1] = context > 0 ? context : 0;
  range[2] = kv_len;
}

unsigned blocks_for(std::int64_t count, std::int64_t a_block) {
  return static_cast<unsigned>((count + a_block - 1) / a_block);
}

}  // namespace

void map_rows(const MapParams& p, cudaStream_t stream) {
  if (p.capacity == 0) return;
  const dim3 grid(blocks_for(p.capacity, kThreads), static_cast<unsigned>(p.ranks));
  launch_kernel(map_rows_kernel, {grid, kThreads, stream}, p);
}

void place_rows(const PlaceParams& p, cudaStream_t stream) {
  if (p.count == 0 || p.row_bytes == 0) return;
  const dim3 block(32, 8);
  const LaunchConfig how{blocks_for(p.count, block.y), block, stream};
  switch (place_word(p)) {
    case 16:
      launch_kernel(place_rows_kernel<uint4>, how, p);
      break;
    case 8:
      launch_kernel(place_rows_kernel<uint2>, how, p);
      break;
    case 4:
      launch_kernel(place_rows_kernel<std::uint32_t>, how, p);
      break;
    case 2:
      launch_kernel(place_rows_kernel<std::uint16_t>, how, p);
      break;
    default:
      launch_kernel(place_rows_kernel<std::uint8_t>, how, p);
  }
}

void key_starts(const KeyStartParams& p, cudaStream_t stream) {
  if (p.batch == 0) return;
  if (p.capacity > 0)
    launch_kernel(padded_key_starts_kernel, {blocks_for(p.batch, kThreads), kThreads, stream}, p);
  else
    launch_kernel(key_starts_kernel, {1, kThreads, stream}, p);
}

void row_starts(const RowStartParams& p, cudaStream_t stream) {
  if (p.batch > 0) launch_kernel(row_starts_kernel, {1, kThreads, stream}, p);
}

void cut_context(const ContextCutParams& p, cudaStream_t stream) {
  if (p.batch.size == 0) return;
  launch_kernel(cut_context_kernel, {blocks_for(p.batch.size, kThreads), kThreads, stream}, p);
}

}  // namespace longspan::kernels::cuda
