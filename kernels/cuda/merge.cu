// States of one row, from ranks or from splits, folded in tree order: neighbours first, missing
// slots empty. A thread carries eight elements of a row through a binary counter in registers and
// reads and writes 16 bytes at a time.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/attend.hpp"
#include "kernels/cuda/merge.hpp"
#include "src/check.hpp"

namespace longspan::kernels::cuda {
namespace {

constexpr int kVector = 8;      // elements of a thread
constexpr int kThreads = 256;   // of a block, at most
constexpr int kFewLevels = 3;   // up to 8 slots: few registers, so that more blocks are resident
constexpr int kMostLevels = 8;  // up to 256 slots

struct Piece {
  Stats stats;
  float o[kVector];
};

__device__ Piece load_piece(const StateSlots& states, int slot, std::int64_t row, int column) {
  Piece piece;
  piece.stats = states.stats(slot)[row];
  const float4* from = reinterpret_cast<const float4*>(states.o(slot, row) + column);
  const float4 low = from[0], high = from[1];
  const float o[kVector] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < kVector; ++i) piece.o[i] = o[i];
  return piece;
}

/// newer = merge(older, newer)
__device__ void merge_pieces(const Piece& older, Piece& newer) {
  const Fold fold = longspan::fold(older.stats, newer.stats);
  newer.stats = fold.stats;
#pragma unroll
  for (int i = 0; i < kVector; ++i) newer.o[i] = fold(older.o[i], newer.o[i]);
}

/// Adds the state of `place` to a binary counter: on level k waits the left half of a subtree of
/// 2^(k+1) places. What is left in `newest` is the subtree that the place completes.
template <int kLevels, int kLevel = 0>
__device__ void count(Piece (&waiting)[kLevels], Piece& newest, int place) {
  if constexpr (kLevel < kLevels) {
    if ((place >> kLevel & 1) == 0) {
      waiting[kLevel] = newest;
    } else {
      merge_pieces(waiting[kLevel], newest);
      count<kLevels, kLevel + 1>(waiting, newest, place);
    }
  }
}

/// The root of the tree over all slots of a row.
template <int kLevels>
__device__ Piece fold_slots(const StateSlots& states, bool interleaved, std::int64_t row,
                            int column) {
  Piece waiting[kLevels];
  Piece newest = load_piece(states, 0, row, column);
  waiting[0] = newest;
  const int levels = log2_ceil(states.slots);
  for (int place = 1; place < 1 << levels; ++place) {
    const int slot = interleaved ? reverse_bits(place, levels) : place;
    if (slot < states.slots)
      newest = load_piece(states, slot, row, column);
    else
      newest.stats = empty_stats();
    count<kLevels>(waiting, newest, place);
  }
  return newest;
}

template <class T>
__device__ void store_elements(T* to, const float (&values)[kVector], bool wide) {
  alignas(16) T rounded[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) rounded[i] = static_cast<T>(values[i]);
  if (wide) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(rounded) / 16); ++i)
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(rounded)[i];
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i) to[i] = rounded[i];
  }
}

// ---- kernels: threadIdx.x = eight columns, (blockIdx.x, threadIdx.y) = rows -------------------

template <int kLevels>
__global__ __launch_bounds__(kThreads) void merge_kernel(const __grid_constant__ MergeParams p, bool wide) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const std::int64_t token = row / p.heads;
  const int head = static_cast<int>(row - token * p.heads), column = threadIdx.x * kVector;
  if (token >= p.tokens) return;
  const std::int64_t from = p.rows == nullptr ? token : p.rows[token];
  if (from < 0) return;  // no row of this rank
  Piece state = fold_slots<kLevels>(p.states, p.interleaved, from * p.heads + head, column);
  if (p.sinks != nullptr) {
    const Fold fold = longspan::fold(state.stats, sink_stats(p.sinks[head]));
    state.stats = fold.stats;
#pragma unroll
    for (float& o : state.o) o = fold(o, 0.0f);
  }
  const Finish finished = finish(state.stats);
#pragma unroll
  for (float& o : state.o) o = finished(o);
  if (p.dtype == DType::fp32)
    store_elements(p.out.at<float>(token, head) + column, state.o, wide);
  else if (p.dtype == DType::fp16)
    store_elements(p.out.at<__half>(token, head) + column, state.o, wide);
  else
    store_elements(p.out.at<__nv_bfloat16>(token, head) + column, state.o, wide);
  if (p.lse != nullptr && column == 0)
    p.lse[token * p.lse_row_stride + head * p.lse_head_stride] = finished.lse;
}

template <int kLevels>
__global__ __launch_bounds__(kThreads) void fold_parts_kernel(const __grid_constant__ AttendParams p,
                                  const __grid_constant__ Plan plan) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= plan.parts.rows) return;
  const int head = static_cast<int>(row % p.heads), column = threadIdx.x * kVector;
  const int token = static_cast<int>(row / p.heads % plan.part_tokens);
  const int sequence = static_cast<int>(row / p.heads / plan.part_tokens);
  const std::int64_t q_len = p.batch.query_len(sequence, p.tokens);
  if (token >= q_len || !serves(plan.lengths, q_len)) return;
  const Piece state = fold_slots<kLevels>(plan.parts, false, row, column);
  const std::int64_t to = (p.batch.first_row(sequence) + token) * p.heads + head;
  if (column == 0) p.state.stats(p.slot)[to] = state.stats;
  float4* o = reinterpret_cast<float4*>(p.state.o(p.slot, to) + column);
  o[0] = make_float4(state.o[0], state.o[1], state.o[2], state.o[3]);
  o[1] = make_float4(state.o[4], state.o[5], state.o[6], state.o[7]);
}

dim3 block_of(int dim) { return dim3(dim / kVector, kThreads / (dim / kVector)); }

dim3 grid_of(std::int64_t rows, dim3 block) {
  return dim3(static_cast<unsigned>((rows + block.y - 1) / block.y));
}

}  // namespace

void merge(const MergeParams& p, cudaStream_t stream) {
  if (p.tokens == 0) return;
  if (p.states.slots > 1 << kMostLevels)
    throw Unsupported("merge of " + std::to_string(p.states.slots) + " states of a row: at most " +
                      std::to_string(1 << kMostLevels) + " on CUDA");
  const std::int64_t bytes = static_cast<std::int64_t>(size_of(p.dtype));
  const bool wide = reinterpret_cast<std::uintptr_t>(p.out.data) % 16 == 0 &&
                    p.out.row_stride * bytes % 16 == 0 && p.out.head_stride * bytes % 16 == 0;
  const dim3 block = block_of(p.states.dim);
  const auto kernel = p.states.slots <= 1 << kFewLevels ? merge_kernel<kFewLevels>
                                                        : merge_kernel<kMostLevels>;
  kernel<<<grid_of(p.tokens * p.heads, block), block, 0, stream>>>(p, wide);
  LONGSPAN_CUDA(cudaGetLastError());
}

void fold_parts(const AttendParams& p, const Plan& plan, cudaStream_t stream) {
  const dim3 block = block_of(p.dim);
  const auto kernel = plan.splits <= 1 << kFewLevels ? fold_parts_kernel<kFewLevels>
                                                     : fold_parts_kernel<kMostLevels>;
  kernel<<<grid_of(plan.parts.rows, block), block, 0, stream>>>(p, plan);
  LONGSPAN_CUDA(cudaGetLastError());
}

}  // namespace longspan::kernels::cuda
