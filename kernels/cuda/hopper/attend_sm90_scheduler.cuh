// The scheduler warp of the Hopper kernel: it finds the next query rows, and the keys that each of
// them sees on this rank. A work tile is a tile of query rows of one sequence and head.
#pragma once

#include <climits>

#include "kernels/cuda/arch/overlap.cuh"
#include "kernels/cuda/combine/run_headers.cuh"
#include "kernels/cuda/common/view.cuh"
#include "kernels/cuda/hopper/attend_sm90_epilogue.cuh"
#include "kernels/cuda/hopper/attend_sm90_scores.cuh"

namespace longspan::kernels::sm90 {

/// Sequence b's tiles take the slots from first_slot(b) on; at least as many as it has tiles.
template <int kRows>
__device__ int first_slot(const Batch& batch, int b) {
  return static_cast<int>(batch.first_row(b)) / kRows + b;
}

/// Finds the index-th work tile and returns its sequence. Work tiles are ordered in sections of
/// heads, in each the slots from the last (the longest under a causal mask) to the first, in each
/// slot the section's heads. In the first section the slots that wait for no other rank's keys come
/// first. In the others they come last, when the longer ones have filled the multiprocessors
/// unevenly.
template <class T>
__device__ int find_work_tile(const KernelParams& call, unsigned index, WorkTile& tile) {
  const AttendParams& params = call.params;
  const unsigned section_tiles = call.slots * call.section;
  const unsigned first_head = index / section_tiles * call.section;
  const unsigned heads = min(call.section, params.heads - first_head);
  unsigned remainder = index % section_tiles, slots = call.slots, below = 0;
  if (first_head == 0 && remainder < call.own_slots * heads) {
    slots = call.own_slots;
  } else if (first_head == 0) {
    remainder -= call.own_slots * heads;
    below = call.own_slots;
    slots -= below;
  }
  tile.head = static_cast<int>(first_head + remainder % heads);
  tile.kv_head = tile.head / (params.heads / params.kv_heads);
  const int slot = static_cast<int>(below + slots - 1 - remainder / heads);

  const int b = last_start(params.batch.size, slot,
                           [&](int i) { return first_slot<T::kRows>(params.batch, i); });
  tile.row = (slot - first_slot<T::kRows>(params.batch, b)) * T::kRows;
  tile.first_row = static_cast<int>(params.batch.first_row(b)) + tile.row;
  const bool apart = params.q.gap.rows > 0;
  tile.query_row = apart ? tile.row : tile.first_row;
  tile.query_head = apart ? b * params.heads + tile.head : tile.head;
  tile.first_key = static_cast<int>(params.batch.first_key(b));
  return b;
}

/// The lse of a row that sees no key: its sink, in the fixed order with the bits of a merge.
template <class T>
__device__ float empty_lse(const Floats& sinks, int head) {
  if (!sinks) return -INFINITY;
  if constexpr (T::kFixedOrder)
    return longspan::finish(sink_stats(sinks[head])).lse;
  else
    return sinks[head];
}

/// One warp writes zeros as the dq of rows that see no key on this rank, unless they have sums.
inline __device__ void store_zeros(const GradientSources& to, const AttendParams& params,
                                   const WorkTile& tile) {
  if (to.resume) return;
  const int group = params.heads / params.kv_heads, of_group = tile.head - tile.kv_head * group;
#pragma unroll 1
  for (int row = 0; row < tile.rows; ++row) {
    const std::int64_t token = std::int64_t{tile.first_row} + row;
    const bool rounded = to.to.data != nullptr;  // to 16 bits
    void* const zeros = rounded ? static_cast<void*>(to.to.at<std::uint16_t>(token, tile.head))
                                : to.dq.at(tile.kv_head, token * group + of_group);
    const int words = rounded ? to.dq.dim / 4 : GradientSums::padded(to.dq.dim) / 2;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < words; i += 32) static_cast<uint2*>(zeros)[i] = {};
  }
}

/// One warp writes the rows that see no key on this rank: their empty state, or their finished
/// zeros. Rows that started from a state keep it. (If they end finished, they do not come here.)
template <class T>
__device__ void store_empty(const KernelParams& call, const WorkTile& tile) {
  const AttendParams& params = call.params;
  if constexpr (T::kGradients) return store_zeros(call.gradients, params, tile);
  const Finished& finished = call.finished;
  const bool finish = finished.out.data != nullptr;
  const int lane = threadIdx.x % 32;
  if (params.resume) return;
#pragma unroll 1
  for (int row = 0; row < tile.rows; ++row) {
    const std::int64_t token = tile.first_row + row, at = token * params.heads + tile.head;
    FinishedRow<typename T::Result> end{};
    if (finish) end = finished_row<typename T::Result>(finished, token, tile.head);
    void* const to = finish ? static_cast<void*>(end.out) : params.state.o(params.slot, at);
#pragma unroll 1
    for (int i = lane; i < params.value_dim / (finish ? 8 : 4); i += 32)
      static_cast<uint4*>(to)[i] = {};
    if (lane > 0) continue;
    if (!finish)
      params.state.stats(params.slot)[at] = empty_stats();
    else if (end.lse != nullptr)
      *end.lse = empty_lse<T>(finished.sinks, tile.head);
  }
}

/// One warp finds the next work tile while the others attend this one, and announces it together
/// with the keys that each of its rows sees. It draws a tile only when the producer wants one: a
/// block with long work takes nothing that another block could begin earlier.
template <class T>
class Scheduler {
 public:
  __device__ __forceinline__ Scheduler(const KernelParams& call, Shared<T>& shared)
      : call_(call), params_(call.params), shared_(shared), lane_(threadIdx.x % 32) {}

  __device__ __forceinline__ void run() {
    if (lane_ == 0) shared_.key_positions.sequence = -1;
    if (call_.arrivals && call_.finished.headers.digests != nullptr) await_digests(call_.arrivals);
    const bool differs = cuda::are_of_different_runs(call_.finished.headers, lane_ == 0);
    for (unsigned index = differs ? call_.work_tiles : blockIdx.x; index < call_.work_tiles;) {
      shared_.work_empty[work_.stage].wait(work_.parity ^ 1);
      WorkTile& tile = shared_.work[work_.stage];
      const Found found = find(index, tile);
      if (found.busy) {
        if (lane_ == 0) complete(tile, found);
        shared_.work_full[work_.stage].arrive();
        work_.advance();
      } else {
        store_empty<T>(call_, tile);
        __syncwarp();  // every lane has read the work tile before the next takes its place
      }
      if (lane_ == 0) {
        if (found.busy) shared_.work_wanted.wait(work_.stage ^ 1);  // the stage just announced
        // Each work tile is one draw, so that the counter is zero again after the last of them.
        index = gridDim.x + atomicInc(call_.next, call_.work_tiles - 1);
      }
      index = __shfl_sync(0xffffffff, index, 0);
    }
    shared_.work_empty[work_.stage].wait(work_.parity ^ 1);
    if (lane_ == 0) shared_.work[work_.stage].tiles = 0;
    shared_.work_full[work_.stage].arrive();
    if (call_.arrivals.behind_puts)
      cuda::arch::wait_for_kernels_before();  // so that the next kernel may
  }

 private:
  /// What all lanes know of a work tile.
  struct Found {
    int sequence;
    int context_len;
    int rows;     // that exist
    bool passes;  // they see no key, but must become a finished result
    bool busy;    // the consumers handle them
  };

  /// Finds the index-th work tile, and what its rows see.
  __device__ __forceinline__ Found find(unsigned index, WorkTile& tile) {
    int b = 0;
    if (lane_ == 0) {
      b = find_work_tile<T>(call_, index, tile);
      if (b != shared_.key_positions.sequence)
        shared_.key_positions.find(params_.shard, b, params_.batch.keys(b, params_.shard));
    }
    b = __shfl_sync(0xffffffff, b, 0);
    __syncwarp();
    const int query_len = static_cast<int>(params_.batch.query_len(b, params_.tokens));
    const int kv_len = static_cast<int>(params_.batch.keys(b, params_.shard));
    const int context_len = static_cast<int>(params_.first_position(b, kv_len));
    const int rows = query_len < call_.least_rows ? 0 : max(min(query_len - tile.row, T::kRows), 0);

    int* const limits = row_limits();
#pragma unroll 1
    for (int i = lane_; i < 2 * rows; i += 32) {
      const std::int64_t position = context_len + params_.query_index(b, tile.row + i / 2);
      const Interval keys = cuda::visible_in_order(params_, b, position, kv_len);
      limits[i] = shared_.key_positions.before(static_cast<int>(i % 2 ? keys.end : keys.begin));
    }
    __syncwarp();
    const int keys = rows > 0 ? limits[2 * rows - 1] - limits[0] : 0;
    // Rows that see no key, start from a state and end finished go through the consumers like all
    // others. Their one tile of keys is before the first key of all, where TMA reads no memory and
    // fills in zeros, and every row masks it.
    const bool passes = keys <= 0 && rows > 0 && params_.resume && call_.finished.out.data;
    const bool busy = keys > 0 || passes;
    if (lane_ == 0) {
      tile.rows = rows;
      tile.tiles = passes ? 1 : (keys + T::kKeys - 1) / T::kKeys;
      if constexpr (T::kFixedOrder) {  // segments that some row sees
        const int first = limits[0] / T::kKeys * T::kKeys;
        if (busy) tile.tiles = (limits[2 * rows - 1] - first + T::kKeys - 1) / T::kKeys;
      }
    }
    __syncwarp();
    return {b, context_len, rows, passes, busy};
  }

  /// One lane writes the remaining fields of an announced work tile.
  __device__ __forceinline__ void complete(WorkTile& tile, const Found& found) {
    const int* const limits = row_limits();
    tile.sequence = found.sequence;
    tile.whole = {limits[2 * found.rows - 2], limits[1]};
    tile.some = {limits[0], limits[2 * found.rows - 1]};
    if (found.passes) tile.some.begin = tile.some.end = -tile.first_key;
    // Before the first key of all nothing has to be cleared: TMA fills in zeros. With pages, the
    // same holds before the first visible one.
    tile.clear = tile.first_key + limits[0] > 0 && !found.passes && !has_pages<T>(call_) ? limits[0]
                                                                                         : INT_MIN;
    if constexpr (T::kFixedOrder)
      shared_.waiting.order[work_.stage] =
          params_.shard.for_sequence(found.sequence)
              .order(params_.batch.keys(found.sequence, params_.shard));
    if constexpr (T::kScores == ScoreKind::any)
      find_alibi(params_.bias, params_.sees_no_later_key(found.sequence), shared_.key_positions,
                 found.sequence, tile.head, found.context_len,
                 static_cast<int>(params_.query_index(found.sequence, tile.row)),
                 shared_.alibi.terms[work_.stage]);
    if constexpr (T::kEightBits) {
      // A scale that is not positive would reverse the order of scores: NaN marks it.
      const float factor = params_.scale(found.sequence, tile.kv_head) * kLog2E;
      shared_.stored.score_factor[work_.stage] = factor > 0.0f ? factor : NAN;
      shared_.stored.value_factor[work_.stage] = params_.v_scale.of(found.sequence, tile.kv_head);
    }
  }

  /// The first local key that a row sees and one past its last, row by row.
  __device__ __forceinline__ int* row_limits() {
    return reinterpret_cast<int*>(shared_.rows[work_.stage]);
  }

  const KernelParams& call_;
  const AttendParams& params_;
  Shared<T>& shared_;
  const int lane_;
  PipelineState<2> work_;
};

}  // namespace longspan::kernels::sm90
