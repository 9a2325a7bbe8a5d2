// The warp of the Hopper kernel that finds the work: which query rows come next, and which keys
// each of them sees on this rank. An item is a tile of query rows of one sequence and head.
#pragma once

#include <climits>

#include "kernels/cuda/common/view.cuh"
#include "kernels/cuda/hopper/attend_sm90_scores.cuh"

namespace longspan::kernels::sm90 {

/// Sequence b's tiles take the slots from first_slot(b) on; at least as many as it has tiles.
template <int kRows>
__device__ int first_slot(const Batch& batch, int b) {
  return static_cast<int>(batch.first_row(b)) / kRows + b;
}

/// The index-th item: sections of heads, in each the slots from the last (the longest under a
/// causal mask) to the first, in each slot the section's heads. Gives its sequence.
template <class T>
__device__ int find_item(const Call& call, unsigned index, Item& item) {
  const AttendParams& params = call.params;
  const unsigned section_items = call.slots * call.section;
  const unsigned first_head = index / section_items * call.section;
  const unsigned heads = min(call.section, params.heads - first_head);
  const unsigned rest = index % section_items;
  item.head = static_cast<int>(first_head + rest % heads);
  item.kv_head = item.head / (params.heads / params.kv_heads);
  const int slot = static_cast<int>(call.slots - 1 - rest / heads);

  const int b = last_start(params.batch.size, slot,
                           [&](int i) { return first_slot<T::kRows>(params.batch, i); });
  item.row = (slot - first_slot<T::kRows>(params.batch, b)) * T::kRows;
  item.first_row = static_cast<int>(params.batch.first_row(b)) + item.row;
  item.first_key = static_cast<int>(params.batch.first_key(b));
  return b;
}

/// One warp: rows that see no key on this rank get their empty state, or their finished zeros; or
/// they keep the state that they began from. (Such rows do not end here.)
template <class T>
__device__ void write_empty(const Call& call, const Item& item) {
  const AttendParams& params = call.params;
  const Finished& finished = call.finished;
  const bool finish = finished.out.data != nullptr;
  const int lane = threadIdx.x % 32;
  if (params.resume) return;
#pragma unroll 1
  for (int row = 0; row < item.rows; ++row) {
    const std::int64_t token = item.first_row + row, at = token * params.heads + item.head;
    void* to = params.state.o(params.slot, at);
    if (finish) to = finished.out.template at<typename T::Result>(token, item.head);
#pragma unroll 1
    for (int i = lane; i < params.head_dim / (finish ? 8 : 4); i += 32)
      static_cast<uint4*>(to)[i] = {};
    if (lane > 0) continue;
    if (!finish)
      params.state.stats(params.slot)[at] = empty_stats();
    else if (finished.lse)
      finished.lse[token * finished.lse_row_stride + item.head * finished.lse_head_stride] =
          finished.sinks ? finished.sinks[item.head] : -INFINITY;
  }
}

/// One warp: finds the next item while the others work on this one, and announces it together with
/// the keys that each of its rows sees. An item is taken only when the loader wants it: a block
/// with long work takes nothing that another block could begin earlier.
template <class T>
__device__ void schedule(const Call& call, Shared<T>& shared) {
  const AttendParams& params = call.params;
  const int lane = threadIdx.x % 32;
  PipelineState<2> turn;
  if (lane == 0) shared.places.sequence = -1;
  for (unsigned index = blockIdx.x; index < call.items;) {
    shared.item_empty[turn.stage].wait(turn.parity ^ 1);
    Item& item = shared.items[turn.stage];
    int b = 0;
    if (lane == 0) {
      b = find_item<T>(call, index, item);
      if (b != shared.places.sequence)
        shared.places.find(params.shard, b, params.batch.keys(b, params.shard));
    }
    b = __shfl_sync(0xffffffff, b, 0);
    __syncwarp();
    const int query_len = static_cast<int>(params.batch.query_len(b, params.tokens));
    const int kv_len = static_cast<int>(params.batch.keys(b, params.shard));
    const int context_len = kv_len - static_cast<int>(params.whole_query_len(b));
    const int rows = query_len < call.least_rows ? 0 : max(min(query_len - item.row, T::kRows), 0);

    int* const limits = reinterpret_cast<int*>(shared.rows[turn.stage]);
#pragma unroll 1
    for (int i = lane; i < 2 * rows; i += 32) {
      const std::int64_t position = context_len + params.query_index(b, item.row + i / 2);
      const Interval keys = cuda::visible_in_order(params, b, position, kv_len);
      limits[i] = shared.places.before(static_cast<int>(i % 2 ? keys.end : keys.begin));
    }
    __syncwarp();
    const int keys = rows > 0 ? limits[2 * rows - 1] - limits[0] : 0;
    // Rows that see no key, begin from a state and end finished go through the consumers like all
    // others. Their one tile stands before the first key of all, where the copy engine reads no
    // memory and fills in zeros, and every row hides it.
    const bool passes = keys <= 0 && rows > 0 && params.resume && call.finished.out.data;
    const bool busy = keys > 0 || passes;
    if (lane == 0) {
      item.rows = rows;
      item.tiles = passes ? 1 : (keys + T::kKeys - 1) / T::kKeys;
    }
    __syncwarp();
    if (busy) {
      if (lane == 0) {
        item.sequence = b;
        item.whole = {limits[2 * rows - 2], limits[1]};
        item.some = {limits[0], limits[2 * rows - 1]};
        if (passes) item.some.begin = item.some.end = -item.first_key;
        // Before the first key of all there is nothing: the copy engine fills in zeros.
        // Nor, out of pages, before the first visible one.
        item.clear =
            item.first_key + limits[0] > 0 && !passes && !has_pages<T>(call) ? limits[0] : INT_MIN;
        if constexpr (T::kScores == Scores::any)
          find_alibi(params.bias, params.is_causal(b), shared.places, item.head, context_len,
                     static_cast<int>(params.query_index(b, item.row)),
                     shared.alibi.items[turn.stage]);
        if constexpr (T::kEightBits) {
          // A scale that is not positive would turn the order of scores: NaN says so.
          const float factor = params.scale(item.kv_head) * kLog2E;
          shared.stored.score_factor[turn.stage] = factor > 0.0f ? factor : NAN;
          shared.stored.value_factor[turn.stage] = params.v_scale[item.kv_head];
        }
      }
      shared.item_full[turn.stage].arrive();
      turn.advance();
    } else {
      write_empty<T>(call, item);
      __syncwarp();  // every lane has read the item before the next takes its place
    }
    if (lane == 0) {
      if (busy) shared.item_wanted.wait(turn.stage ^ 1);  // the stage just announced
      // An item, one draw: after the last of all draws the counter is zero again.
      index = gridDim.x + atomicInc(call.next, call.items - 1);
    }
    index = __shfl_sync(0xffffffff, index, 0);
  }
  shared.item_empty[turn.stage].wait(turn.parity ^ 1);
  if (lane == 0) shared.items[turn.stage].tiles = 0;
  shared.item_full[turn.stage].arrive();
}

}  // namespace longspan::kernels::sm90
