// Converts longspan's states into states per segment, as serving engines store them, and those into
// results.
//
//     max = m ln 2,  expsum = l,  output = o      (m in base 2; an empty segment: -inf, 0, 0)
//
// There they fold in natural units, so that a max of any size keeps its value. In the reduction a
// block takes one row, since rows are few and segments many. It computes the maximum and the sum of
// all segments first, then adds the weighted outputs.
#include <algorithm>

#include "kernels/batch_rows.hpp"
#include "kernels/cuda/arch/shared.cuh"
#include "kernels/cuda/combine/merge.hpp"
#include "kernels/cuda/common/convert.cuh"
#include "kernels/cuda/common/launch.hpp"

namespace longspan::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 4;

/// The number of local keys of the sequence that a row belongs to; -1 if the row is left out.
__device__ std::int64_t local_len_of(const Batch& batch, const Shard& shard, std::int64_t token) {
  const int b = sequence_of_row(batch, token);
  return b < 0 ? -1 : shard.for_sequence(b).local_len(batch.keys(b, shard));
}

/// Exports. threadIdx.x = four columns; (blockIdx.x, threadIdx.y) = a segment of a row, segments
/// fastest.
__global__ __launch_bounds__(kThreads) void export_kernel(
    const __grid_constant__ ExportSegmentsParams p, bool wide) {
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const std::int64_t row = at / p.to.segments, token = row / p.heads;
  const int segment = static_cast<int>(at - row * p.to.segments);
  const int column = static_cast<int>(threadIdx.x) * kVector;
  if (token >= p.tokens) return;
  const std::int64_t local_len = local_len_of(p.batch, p.shard, token);
  if (local_len < 0 || segment >= filled_segments(p.parts, p.to.segments, local_len)) return;
  Stats stats = p.states.stats(segment)[row];
  const bool has_keys = !is_empty(stats);
  float factor = 1.0f;
  if (segment == 0 && p.sinks) {
    const Fold fold = longspan::fold(stats, sink_stats(p.sinks[row - token * p.heads]));
    factor = fold(1.0f, 0.0f);
    stats = fold.stats;
  }
  if (is_empty(stats)) stats = empty_stats();
  if (column == 0) {
    p.to.max[at] = stats.max * kLn2;
    p.to.expsum[at] = stats.sum;
  }
  const float4 o = *reinterpret_cast<const float4*>(p.states.o(segment, row) + column);
  float values[kVector] = {o.x, o.y, o.z, o.w};
#pragma unroll
  for (float& value : values) value = has_keys ? value * factor : 0.0f;
  float* to = p.to.output + at * p.to.padded_dim + column;
  if (wide && column < p.states.dim) {
    store_as(to, values);
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      if (column + i < p.states.dim) to[i] = values[i];
  }
}

/// Combines the values of all threads of the block. `shared` has an entry for each warp.
template <class Combine>
__device__ float over_block(float value, float* shared, const Combine& combine) {
  constexpr int kWarps = kThreads / 32;
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    value = combine(value, __shfl_xor_sync(0xffffffffu, value, distance));
  __syncthreads();  // the last use of `shared` is over
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  value = shared[0];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) value = combine(value, shared[warp]);
  return value;
}

/// The greater of two; fmaxf would lose a NaN.
__device__ float greater(float a, float b) { return a > b || a != a ? a : b; }

/// Reduces one row. Threads = columns in kCount, times groups that share the segments.
template <int kCount>
__global__ __launch_bounds__(kThreads) void reduce_kernel(
    const __grid_constant__ ReduceSegmentsParams p, int groups) {
  auto& shared = arch::shared_variable<float[kThreads / 32]>();
  auto& sums = arch::shared_variable<float[kThreads][kCount]>();
  const std::int64_t row = blockIdx.x, token = row / p.heads;
  const int head = static_cast<int>(row - token * p.heads);
  const std::int64_t local_len = local_len_of(p.batch, p.shard, token);
  if (local_len < 0) return;
  const LoadedScale scale(p.out_scale);
  const int filled = filled_segments(p.parts, p.from.segments, local_len);
  const auto stats_of = [&](int s) {
    const std::int64_t at = row * p.from.segments + s;
    return segment_stats(p.from.max[at], p.from.expsum[at]);
  };
  const int self = static_cast<int>(threadIdx.x);
  float max = -infinity();
  for (int s = self; s < filled; s += kThreads) max = greater(max, stats_of(s).max);
  max = over_block(max, shared, greater);
  const auto weight_of = [&](Stats stats) {
    if (is_empty(stats)) return 0.0f;
    return stats.max == max ? 1.0f : fold_ratio(stats.max, max, LogBase::e);
  };
  float sum = 0.0f;
  for (int s = self; s < filled; s += kThreads) {
    const Stats stats = stats_of(s);
    sum = fmaf(stats.sum, weight_of(stats), sum);
  }
  sum = over_block(sum, shared, [](float a, float b) { return a + b; });
  const Finish finished = finish({max, sum});

  const int columns = kThreads / groups, lane = self % columns, group = self / columns;
  for (int first = 0; first < p.dim; first += columns * kCount) {
    const int column = first + lane * kCount;
    float o[kCount] = {};
    if (group < groups && column < p.dim) {
#pragma unroll 4
      for (int s = group; s < filled; s += groups) {
        const Stats stats = stats_of(s);
        if (is_empty(stats)) continue;
        const float weight = weight_of(stats);
        const float* from =
            p.from.output + (row * p.from.segments + s) * p.from.padded_dim + column;
        float values[kCount];
        if constexpr (kCount == 1) {
          values[0] = *from;
        } else {
          const float4 four = *reinterpret_cast<const float4*>(from);
          values[0] = four.x, values[1] = four.y, values[2] = four.z, values[3] = four.w;
        }
#pragma unroll
        for (int c = 0; c < kCount; ++c) o[c] = fmaf(values[c], weight, o[c]);
      }
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < kCount; ++c) sums[self][c] = o[c];
    __syncthreads();
    if (group == 0 && column < p.dim) {
      for (int other = 1; other < groups; ++other)
#pragma unroll
        for (int c = 0; c < kCount; ++c) o[c] += sums[other * columns + lane][c];
#pragma unroll
      for (float& value : o) value = finished(value);
      scale.apply(o);
      store_elements(p.out.data, p.dtype,
                     token * p.out.row_stride + head * p.out.head_stride + column, o);
    }
  }
  if (self == 0 && p.lse.data != nullptr) *p.lse.at(token, head) = part_lse({max, sum}, LogBase::e);
}

bool is_aligned_to_16(const SegmentView& view) {
  return reinterpret_cast<std::uintptr_t>(view.output) % 16 == 0 && view.padded_dim % kVector == 0;
}

}  // namespace

void export_segments(const ExportSegmentsParams& p, cudaStream_t stream) {
  const std::int64_t count = p.tokens * p.heads * p.to.segments;
  if (count == 0) return;
  const int columns = p.states.columns() / kVector;
  const dim3 block(columns, kThreads / columns);
  const bool wide = p.states.dim % kVector == 0 && is_aligned_to_16(p.to);
  launch_kernel(export_kernel,
                {static_cast<unsigned>((count + block.y - 1) / block.y), block, stream}, p, wide);
}

void reduce_segments(const ReduceSegmentsParams& p, cudaStream_t stream) {
  const std::int64_t rows = p.tokens * p.heads;
  if (rows == 0) return;
  const bool wide =
      p.dim % kVector == 0 && is_aligned_to_16(p.from) && is_aligned<kVector>(p.out, p.dtype);
  const int columns = wide ? p.dim / kVector : p.dim;
  const int groups = std::max(1, std::min(kThreads / columns, p.from.segments));
  if (wide)
    launch_kernel(reduce_kernel<kVector>, {static_cast<unsigned>(rows), kThreads, stream}, p,
                  groups);
  else
    launch_kernel(reduce_kernel<1>, {static_cast<unsigned>(rows), kThreads, stream}, p, groups);
}

}  // namespace longspan::kernels::cuda
