// Folds the states of one row, from ranks or from splits, in tree order: neighbours first, missing
// slots empty. A thread handles eight elements of a row of ranks' states and four of splits', and
// reads 16 bytes at a time.
#include "kernels/cuda/combine/merge.hpp"

#include <algorithm>
#include <string>

#include "kernels/batch_rows.hpp"
#include "kernels/cuda/arch/overlap.cuh"
#include "kernels/cuda/arch/shared.cuh"
#include "kernels/cuda/combine/fold_slots.cuh"
#include "kernels/cuda/combine/row_epilogue.cuh"
#include "kernels/cuda/combine/run_headers.cuh"
#include "kernels/cuda/common/convert.cuh"
#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/dispatch/attend.hpp"

namespace longspan::kernels::cuda {
namespace {

constexpr int kVector = 8;                // elements of a thread
constexpr int kThreads = 256;             // most of a block
constexpr int kFoldThreads = 256;         // most of a fold_parts block
constexpr int kFoldLevels = 3;            // most levels that a thread of fold_parts folds alone
constexpr int kFoldVector = 4;            // elements of a thread of fold_parts
constexpr std::int64_t kMany = 16 << 20;  // bytes of splits that take longer than a read of which
                                          // of them were written
static_assert(kFoldThreads / 8 << kFoldLevels >= kMostSplits);
using StatePiece = StateColumns<kVector>;

__device__ StatePiece load_piece(const StateSlots& states, int slot, std::int64_t row, int column) {
  StatePiece piece;
  piece.stats = states.stats(slot)[row];
  const float4* from = reinterpret_cast<const float4*>(states.o(slot, row) + column);
  const float4 low = from[0], high = from[1];
  const float o[kVector] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < kVector; ++i) piece.o[i] = o[i];
  return piece;
}

/// The states of a row in slots, by their index in the tree.
struct Places {
  const StateSlots& states;
  bool interleaved;
  int levels;  // of the tree
  std::int64_t row;
  int column;

  __device__ StatePiece operator()(int place) const {
    const int slot = interleaved ? reverse_bits(place, levels) : place;
    // Past the last slot it returns an empty state, after a load that needs no branch.
    StatePiece piece = load_piece(states, min(slot, states.slots - 1), row, column);
    if (slot >= states.slots) piece.stats = empty_stats();
    return piece;
  }
};

/// Finishes a merged state of `dim` columns: sink, division, scale, rounding.
template <int kColumns>
__device__ void finish_row(const MergeParams& m, int dim, std::int64_t token, int head, int column,
                           StateColumns<kColumns>& state, bool wide) {
  RowEpilogue(m, head).finish(state);
  store_result(m, ResultPlace(m, token, head, column), state, dim - column, wide);
}

// ---- kernels: threadIdx.x = columns, (blockIdx.x, threadIdx.y) = rows --------------------------

/// With `most` > 0, each sequence has up to `most` tokens, and longer sequences are left out.
template <int kLevels>
__global__ __launch_bounds__(kThreads) void merge_kernel(const __grid_constant__ MergeParams p,
                                                         bool wide, int most) {
  if (are_of_different_runs(p.headers)) return;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  std::int64_t token = row / p.heads;
  const int head = static_cast<int>(row - token * p.heads), column = threadIdx.x * kVector;
  if (most > 0) {
    const std::int64_t sequence = token / most;
    if (sequence >= p.batch.size) return;
    const int b = static_cast<int>(sequence);
    const std::int64_t q_len = p.batch.query_len(b, p.tokens), t = token - sequence * most;
    if (q_len > most || t >= q_len || p.batch.skips(q_len)) return;
    token = p.batch.first_row(b) + t;
  }
  if (token >= p.tokens) return;
  if (p.rows != nullptr ? p.rows[token] < 0 : !in_batch(p.batch, token)) return;
  const int levels = log2_ceil(p.states.slots);
  StatePiece state = fold_tree<kLevels>(
      Places{p.states, p.interleaved, levels, p.state_row(token, head), column}, levels);
  finish_row(p, p.states.dim, token, head, column, state, wide);
}

/// Whether the launch serves every row of the batch, so that no row's sequence need be searched:
/// its reads of the batch's starts would follow one another.
__device__ bool holds_only_short(const AttendParams& p, const WorkPlan& plan) {
  return plan.lengths == Lengths::only_short && p.max_query_len > 0 &&
         p.max_query_len <= kShortQuery;
}

/// Folds the splits of short sequences. A block takes some columns (blockIdx.y, threadIdx.x) of
/// some rows (blockIdx.x, threadIdx.z). A thread (threadIdx.y) loads 2^kLevels splits at once and
/// folds them alone; the rest of the tree goes through shared memory. kFinish writes the result
/// `m`. `choosy`: it first reads which splits were written, and then only those.
template <int kLevels, bool kFinish>
__global__ __launch_bounds__(kFoldThreads) void fold_parts_kernel(
    const __grid_constant__ AttendParams p, const __grid_constant__ WorkPlan plan,
    const __grid_constant__ MergeParams m, bool wide, bool choosy) {
  auto& waiting = arch::shared_variable<Waiting<kFoldThreads>>();
  const unsigned row = blockIdx.x * blockDim.z + threadIdx.z;
  const unsigned last_row = static_cast<unsigned>(plan.parts.rows) - 1;
  const unsigned heads = static_cast<unsigned>(p.heads);
  const int head = static_cast<int>(row % heads);
  const int column = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x) * kFoldVector;
  arch::let_next_kernel_start();  // an exchange, which then waits here for the states
  const unsigned of_sequence = static_cast<unsigned>(plan.part_tokens);
  int sequence = 0;
  if (of_sequence > 0) {  // in a batch with long sequences, most rows belong to no short one
    sequence = min(static_cast<int>(row / heads / of_sequence), p.batch.size - 1);
    if (!__syncthreads_or(serves(plan.lengths, p.batch.query_len(sequence, p.tokens)))) return;
  }
  // The splits' states are loaded first. Rows without a sequence hold undefined scratch, and are
  // not stored.
  const StateSlots& parts = plan.parts;
  const int first = static_cast<int>(threadIdx.y) << kLevels;
  const Stats* stats = parts.stats(first) + min(row, last_row);
  const float* from = parts.o(first, min(row, last_row)) + column;
  const TakenSplits taken(plan.numbers);
  const auto holds = [&](int i) { return taken.hold(first + i); };
  const auto bytes = static_cast<std::uint64_t>(parts.slot_bytes());
  StateColumns<kFoldVector> state = choosy ? fold_slots<kLevels, true>(stats, from, bytes, holds)
                                           : fold_slots<kLevels>(stats, from, bytes, holds);
  std::int64_t token = row / heads;  // of the whole batch
  bool exists = row <= last_row;
  if (of_sequence == 0 && holds_only_short(p, plan)) {
    exists = exists && in_batch(p.batch, token);
  } else {
    if (of_sequence > 0)
      token = p.batch.first_row(sequence) + token % of_sequence;
    else
      sequence = last_start(p.batch.size, token, [&](int b) { return p.batch.first_row(b); });
    const std::int64_t q_len = p.batch.query_len(sequence, p.tokens);
    exists = exists && token < p.batch.first_row(sequence) + q_len && serves(plan.lengths, q_len);
  }
  const unsigned self = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  fold_threads(state, waiting, threadIdx.y, blockDim.y, self, blockDim.x);
  if (threadIdx.y != 0 || !exists) return;
  if constexpr (kFinish) return finish_row(m, p.value_dim, token, head, column, state, wide);
  const std::int64_t to = token * p.heads + head;
  if (column == 0) p.state.stats(p.slot)[to] = state.stats;
  float4* o = reinterpret_cast<float4*>(p.state.o(p.slot, to) + column);
  *o = make_float4(state.o[0], state.o[1], state.o[2], state.o[3]);
}

dim3 block_of(int columns) { return dim3(columns / kVector, kThreads / (columns / kVector)); }

dim3 grid_of(std::int64_t rows, dim3 block) {
  return dim3(static_cast<unsigned>((rows + block.y - 1) / block.y));
}

void merge_rows(const MergeParams& p, int most, cudaStream_t stream) {
  if (p.tokens == 0) return;
  if (p.states.slots > 1 << kMostLevels)
    throw Unsupported("merge of " + std::to_string(p.states.slots) + " states of a row: at most " +
                      std::to_string(1 << kMostLevels) + " on CUDA");
  const bool wide = is_wide_result<kVector>(p, p.states.dim);
  const dim3 block = block_of(p.states.columns());
  const std::int64_t tokens = most > 0 ? std::int64_t{p.batch.size} * most : p.tokens;
  for_levels<kGroupLevels + 1>(log2_ceil(p.states.slots), [&](auto levels) {
    launch_kernel(merge_kernel<decltype(levels)::value>,
                  {grid_of(tokens * p.heads, block), block, stream}, p, wide, most);
  });
}

template <bool kFinish>
void launch_fold(const AttendParams& p, const WorkPlan& plan, const MergeParams& m,
                 cudaStream_t stream) {
  const bool wide = kFinish && is_wide_result<kFoldVector>(m, p.value_dim);
  const int alone = std::min(kFoldLevels, log2_ceil(plan.splits)), remainder = plan.splits >> alone;
  const int vectors = padded_dim(p.value_dim) / kFoldVector;
  // A block takes few columns if the splits fill it, so that few rows occupy many multiprocessors.
  const bool all = remainder < 8 && vectors * remainder <= kFoldThreads;
  const int columns = all ? vectors : vectors % 8 == 0 ? 8 : vectors % 4 == 0 ? 4 : 2;
  const int rows = std::max(1, kFoldThreads / 2 / (columns * remainder));
  const dim3 grid(static_cast<unsigned>((plan.parts.rows + rows - 1) / rows), vectors / columns);
  // If the lengths of a batch are even, most of its splits are not written.
  const bool choosy = plan.numbers.where_uneven && plan.parts.slot_bytes() * plan.splits > kMany;
  for_levels<kFoldLevels>(alone, [&](auto levels) {
    launch_kernel(fold_parts_kernel<decltype(levels)::value, kFinish>,
                  {grid, dim3(columns, remainder, rows), stream}, p, plan, m, wide, choosy);
  });
}

}  // namespace

void merge(const MergeParams& p, cudaStream_t stream) { merge_rows(p, 0, stream); }

void merge_short(const MergeParams& p, int most, cudaStream_t stream) {
  merge_rows(p, most, stream);
}

void fold_parts(const AttendParams& p, const WorkPlan& plan, cudaStream_t stream) {
  launch_fold<false>(p, plan, {}, stream);
}

void fold_parts_finished(const AttendParams& p, const WorkPlan& plan, const MergeParams& m,
                         cudaStream_t stream) {
  launch_fold<true>(p, plan, m, stream);
}

}  // namespace longspan::kernels::cuda
