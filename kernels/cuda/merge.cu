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

constexpr int kVector = 8;       // elements of a thread
constexpr int kThreads = 256;    // of a block, at most
constexpr int kGroupLevels = 3;  // a thread loads up to 8 slots before it folds the first two
constexpr int kMostLevels = 8;   // up to 256 slots

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

/// Where the slots of a row stand in the tree.
struct Places {
  const StateSlots& states;
  bool interleaved;
  int levels;  // of the tree

  __device__ Piece load(int place, std::int64_t row, int column) const {
    const int slot = interleaved ? reverse_bits(place, levels) : place;
    // Past the last slot: an empty state, after a load that needs no branch.
    Piece piece = load_piece(states, min(slot, states.slots - 1), row, column);
    if (slot >= states.slots) piece.stats = empty_stats();
    return piece;
  }
};

/// The state of the subtree over places [place, place + 2^kLevels).
template <int kLevels>
__device__ Piece fold_subtree(const Places& places, int place, std::int64_t row, int column) {
  if constexpr (kLevels == 0) {
    return places.load(place, row, column);
  } else {
    const Piece older = fold_subtree<kLevels - 1>(places, place, row, column);
    Piece newer = fold_subtree<kLevels - 1>(places, place + (1 << (kLevels - 1)), row, column);
    merge_pieces(older, newer);
    return newer;
  }
}

/// Adds a group of places to a binary counter: on level k waits the left half of a subtree of
/// 2^(k+1) groups. What is left in `newest` is the subtree that the group completes.
template <int kLevel = 0>
__device__ void count(Piece (&waiting)[kMostLevels - kGroupLevels], Piece& newest, int group) {
  if constexpr (kLevel < kMostLevels - kGroupLevels) {
    if ((group >> kLevel & 1) == 0) {
      waiting[kLevel] = newest;
    } else {
      merge_pieces(waiting[kLevel], newest);
      count<kLevel + 1>(waiting, newest, group);
    }
  }
}

/// The root of the tree over all slots of a row; kLevels: of the tree, or more than kGroupLevels.
template <int kLevels>
__device__ Piece fold_slots(const Places& places, std::int64_t row, int column) {
  if constexpr (kLevels <= kGroupLevels) {
    return fold_subtree<kLevels>(places, 0, row, column);
  } else {
    Piece waiting[kMostLevels - kGroupLevels];
    Piece newest;
    for (int group = 0; group < 1 << (places.levels - kGroupLevels); ++group) {
      newest = fold_subtree<kGroupLevels>(places, group << kGroupLevels, row, column);
      count(waiting, newest, group);
    }
    return newest;
  }
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
__global__ __launch_bounds__(kThreads) void merge_kernel(const __grid_constant__ MergeParams p,
                                                         bool wide) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const std::int64_t token = row / p.heads;
  const int head = static_cast<int>(row - token * p.heads), column = threadIdx.x * kVector;
  if (token >= p.tokens) return;
  const std::int64_t from = p.rows == nullptr ? token : p.rows[token];
  if (from < 0) return;  // no row of this rank
  Piece state = fold_slots<kLevels>({p.states, p.interleaved, log2_ceil(p.states.slots)},
                                    from * p.heads + head, column);
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

/// The splits of short sequences: a block takes one row. threadIdx.y = eight splits, which a thread
/// folds alone; the rest of the tree goes through shared memory.
template <int kLevels>
__global__ __launch_bounds__(kThreads) void fold_parts_kernel(
    const __grid_constant__ AttendParams p, const __grid_constant__ Plan plan) {
  __shared__ Piece waiting[kThreads];
  const std::int64_t row = blockIdx.x;
  const int head = static_cast<int>(row % p.heads), column = threadIdx.x * kVector;
  std::int64_t token = row / p.heads;  // of the whole batch
  int sequence;
  if (plan.part_tokens > 0) {
    sequence = static_cast<int>(token / plan.part_tokens);
    const std::int64_t first = p.batch.first_row(sequence);
    token = first + token % plan.part_tokens;
  } else {
    sequence = last_start(p.batch.size, token, [&](int b) { return p.batch.first_row(b); });
  }
  const std::int64_t q_len = p.batch.query_len(sequence, p.tokens);
  if (token >= p.batch.first_row(sequence) + q_len || !serves(plan.lengths, q_len)) return;
  const Places places{plan.parts, false, log2_ceil(plan.splits)};
  Piece state =
      fold_subtree<kLevels>(places, static_cast<int>(threadIdx.y) << kLevels, row, column);
  const int self = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
  for (unsigned distance = 1; distance < blockDim.y; distance *= 2) {
    waiting[self] = state;
    __syncthreads();
    if (threadIdx.y % (2 * distance) == 0) {
      Piece newer = waiting[self + distance * blockDim.x];
      merge_pieces(state, newer);
      state = newer;
    }
    __syncthreads();
  }
  if (threadIdx.y != 0) return;
  const std::int64_t to = token * p.heads + head;
  if (column == 0) p.state.stats(p.slot)[to] = state.stats;
  float4* o = reinterpret_cast<float4*>(p.state.o(p.slot, to) + column);
  o[0] = make_float4(state.o[0], state.o[1], state.o[2], state.o[3]);
  o[1] = make_float4(state.o[4], state.o[5], state.o[6], state.o[7]);
}

/// use(std::integral_constant) of the number of levels, up to `kMost`.
template <int kMost, int kLevels = 0, class Use>
void for_levels(int levels, const Use& use) {
  if constexpr (kLevels < kMost) {
    if (levels > kLevels) return for_levels<kMost, kLevels + 1>(levels, use);
  }
  use(std::integral_constant<int, kLevels>{});
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
  for_levels<kGroupLevels + 1>(log2_ceil(p.states.slots), [&](auto levels) {
    merge_kernel<decltype(levels)::value>
        <<<grid_of(p.tokens * p.heads, block), block, 0, stream>>>(p, wide);
  });
  LONGSPAN_CUDA(cudaGetLastError());
}

void fold_parts(const AttendParams& p, const Plan& plan, cudaStream_t stream) {
  const int groups = plan.splits >> kGroupLevels;
  const dim3 block(p.dim / kVector, groups > 1 ? groups : 1);
  for_levels<kGroupLevels>(log2_ceil(plan.splits), [&](auto levels) {
    fold_parts_kernel<decltype(levels)::value>
        <<<static_cast<unsigned>(plan.parts.rows), block, 0, stream>>>(p, plan);
  });
  LONGSPAN_CUDA(cudaGetLastError());
}

}  // namespace longspan::kernels::cuda
