// Writes new keys and values into this rank's cache. A block takes a row of one tensor; a thread
// takes eight elements of it if eight are adjacent on both sides, otherwise one. RoPE rotates keys
// before they are rounded.
//
//     cache[slot] = x / scale
//
// A row that carries its scales (RowFormat) is made by a kernel of its own: a warp takes a group.
#include "kernels/batch_rows.hpp"
#include "kernels/cuda/arch/overlap.cuh"
#include "kernels/cuda/cache/rotate.cuh"
#include "kernels/cuda/combine/merge.hpp"
#include "kernels/cuda/common/launch.hpp"

namespace longspan::kernels::cuda {
namespace {

constexpr int kThreads = 256;

/// The copy for one of the two tensors.
struct Copy {
  Rows from;
  KvRows to;
  ScaleView scales;  // of the row in the cache
  int dim;           // of a row of a head
};

template <int kCount, bool kRotates>
__device__ void copy_row(const AppendParams& p, const Copy& copy, std::int64_t token,
                         std::int64_t at) {
  const int pieces = copy.dim / kCount;
  const std::int64_t position = kRotates ? new_position(p, token) : 0;
  for (int i = static_cast<int>(threadIdx.x); i < p.kv_heads * pieces; i += kThreads) {
    const int head = i / pieces, column = (i - head * pieces) * kCount;
    const std::int64_t from = token * copy.from.row_stride + head * copy.from.head_stride;
    const std::int64_t to = at + head * copy.to.head_stride + copy.to.column(column);
    float values[kCount];
    load_values(copy.from.data, p.dtype, from + column, values);
    if constexpr (kRotates)
      Rotations<kCount>(p.rope, position, column).apply(copy.from.data, p.dtype, from, values);
    if (copy.scales) {
      const float scale = copy.scales.of(0, head);
#pragma unroll
      for (float& value : values) value /= scale;
    }
    store_elements(copy.to.data, p.kv_dtype, to, values);
  }
}

/// Appends. blockIdx.x = a new row, blockIdx.y = 0: keys, 1: values.
template <bool kRotates>
__global__ __launch_bounds__(kThreads) void append_kernel(const __grid_constant__ AppendParams p,
                                                          bool wide_k, bool wide_v) {
  arch::let_next_kernel_start();  // attention, which waits for the cache
  const std::int64_t token = blockIdx.x;
  const CacheRow row = cache_row(p, token);
  if (row.row < 0) return;
  const bool is_key = blockIdx.y == 0;
  const Copy copy = is_key ? Copy{p.new_k, p.k, scales_at(p, p.k_scale, token, row), p.head_dim}
                           : Copy{p.new_v, p.v, scales_at(p, p.v_scale, token, row), p.value_dim};
  const std::int64_t at = row.offset(copy.to);
  const bool wide = is_key ? wide_k : wide_v;
  if (kRotates && is_key)
    wide ? copy_row<kVector, kRotates>(p, copy, token, at)
         : copy_row<1, kRotates>(p, copy, token, at);
  else
    wide ? copy_row<kVector, false>(p, copy, token, at) : copy_row<1, false>(p, copy, token, at);
}

/// Appends rows that carry their scales. blockIdx.x = a new row; a warp takes every eighth group of
/// its numbers, and all threads the numbers that are not codes.
__global__ __launch_bounds__(kThreads) void append_rows_kernel(
    const __grid_constant__ AppendParams p) {
  arch::let_next_kernel_start();
  const std::int64_t token = blockIdx.x;
  const CacheRow place = cache_row(p, token);
  if (place.row < 0) return;
  const RowFormat format = row_format_of(p.kv_dtype);
  const StoredRow to = p.k.stored(place.page, place.row);
  const auto number = [&](int c) {
    return load_element(p.new_k.data, p.dtype, token * p.new_k.row_stride + c);
  };
  constexpr int kWarp = 32;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp;
  for (int group = thread / kWarp; group * format.group < format.coded; group += kThreads / kWarp) {
    const int first = group * format.group, end = first + format.group;
    float amax = 0;
    for (int c = first + lane; c < end; c += kWarp) amax = fmaxf(amax, fabsf(number(c)));
    for (int step = 1; step < kWarp; step *= 2)
      amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, step));
    const float scale = scale_for(format, amax);
    if (lane == 0) store_scale(to, format, group, scale);
    for (int c = first + lane; c < end; c += kWarp) store_number(to, format, c, scale, number(c));
  }
  for (int c = format.coded + thread; c < format.dim; c += kThreads)
    store_number(to, format, c, 1, number(c));
}

/// Whether eight elements are adjacent, and aligned, at both ends.
bool is_wide(const AppendParams& p, const Rows& from, const KvRows& to, int dim) {
  const StorageFormat format = storage_of(p.kv_dtype);
  const int access = access_bytes<kVector>(p.kv_dtype);
  const bool together = to.dense() ? true
                                   : to.dim_stride == 1 && to.chunk % kVector == 0 &&
                                         format.bytes(to.chunk_stride) % access == 0;
  return dim % kVector == 0 && together && is_aligned<kVector>(from, p.dtype) &&
         is_aligned<kVector>(to, p.kv_dtype) && format.bytes(to.page_stride) % access == 0;
}

}  // namespace

void append(const AppendParams& p, cudaStream_t stream) {
  if (p.tokens == 0) return;
  if (is_latent_row(p.kv_dtype))
    return launch_kernel(append_rows_kernel,
                         {dim3(static_cast<unsigned>(p.tokens)), kThreads, stream}, p);
  const dim3 grid(static_cast<unsigned>(p.tokens), p.new_v.data == nullptr ? 1 : 2);
  launch_kernel(p.rope ? append_kernel<true> : append_kernel<false>, {grid, kThreads, stream}, p,
                is_wide(p, p.new_k, p.k, p.head_dim), is_wide(p, p.new_v, p.v, p.value_dim));
}

}  // namespace longspan::kernels::cuda
