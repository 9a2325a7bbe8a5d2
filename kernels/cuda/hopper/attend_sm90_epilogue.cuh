// The start and end of a consumer's query rows in the Hopper kernel: the state from which they may
// start, and the epilogue, which stores their state or their finished result.
#pragma once

#include "kernels/cuda/hopper/attend_sm90_softmax.cuh"

namespace longspan::kernels::sm90 {

/// The columns of values. Those of e4m3 are as wide as keys; at dim 64 ptxas serialises its
/// products (C7511) if the epilogue reads the other field.
template <class T>
__device__ int value_dim_of(const AttendParams& params) {
  return T::kEightBits ? params.head_dim : params.value_dim;
}

/// A row starts from its state in memory, unless that is empty. Its maximum becomes the row's
/// origin, and its sum that of one thread of the four. The thread reads exactly what it writes in
/// store_state, and max and sum, which the first of the four writes there.
template <class T>
__device__ void load_state(const KernelParams& call, const Shared<T>& shared, int stage, int row,
                           OnlineSoftmax<T>& softmax, int h, float (&o)[T::kValueDim / 2]) {
  const WorkTile& tile = shared.work[stage];
  if (row >= tile.rows) return;
  const StateSlots& state = call.params.state;
  const std::int64_t at =
      static_cast<std::int64_t>(tile.first_row + row) * call.params.heads + tile.head;
  const Stats stats = state.stats(call.params.slot)[at];
  if (is_empty(stats)) return;
  const int t = threadIdx.x % 4;
  softmax.max[h] = softmax.origin[h] = lowered<T>(stats.max, shared, stage, row);
  softmax.sum[h] = t == 0 ? stats.sum : 0.0f;
  const float* from = state.o(call.params.slot, at);
#pragma unroll
  for (int j = 0; j < T::kValueDim / 8; ++j)
    if (8 * j < value_dim_of<T>(call.params)) {
      const float2 pair = *reinterpret_cast<const float2*>(from + 8 * j + 2 * t);
      o[4 * j + 2 * h] = pair.x;
      o[4 * j + 2 * h + 1] = pair.y;
    }
}

/// The factor of O that its sum does not have: the scale of quantised values, and, if weights were
/// rounded to e4m3, the exact sum over the rounded one. sum: the row's.
template <class T>
__device__ float value_factor(const Shared<T>& shared, int stage, float sum, int h,
                              const float (&o)[T::kColumns / 2]) {
  if constexpr (T::kEightBits) {
    const float rounded = o[T::kValueDim / 2 + 2 * h];
    return shared.stored.value_factor[stage] * (rounded == 0.0f ? 1.0f : sum / rounded);
  } else {
    return 1.0f;
  }
}

/// The epilogue of one row that ends as a state.
template <class T>
__device__ void store_state(const KernelParams& call, const Shared<T>& shared, int stage, int row,
                            const OnlineSoftmax<T>& softmax, int h,
                            const float (&o)[T::kColumns / 2]) {
  const WorkTile& tile = shared.work[stage];
  const Stats stats = softmax.stats(h);
  if (row >= tile.rows) return;
  const StateSlots& state = call.params.state;
  const std::int64_t at =
      static_cast<std::int64_t>(tile.first_row + row) * call.params.heads + tile.head;
  const int t = threadIdx.x % 4;
  const float factor = softmax.to_max(h);
  if (t == 0)
    state.stats(call.params.slot)[at] = {lifted<T>(softmax.max[h], shared, stage, row),
                                         stats.sum * factor};
  const float of_o = factor * value_factor<T>(shared, stage, stats.sum, h, o);
  float* to = state.o(call.params.slot, at);
#pragma unroll
  for (int j = 0; j < T::kValueDim / 8; ++j)
    if (8 * j < value_dim_of<T>(call.params))
      *reinterpret_cast<float2*>(to + 8 * j + 2 * t) =
          float2{o[4 * j + 2 * h] * of_o, o[4 * j + 2 * h + 1] * of_o};
}

/// Four lanes of a quad hold a row's columns in pairs. They swap pairs until each holds eight
/// consecutive columns, so that every store is 16 bytes.
__device__ inline uint4 gather_eight(const std::uint32_t (&w)[4]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
  std::uint32_t x[4], y[4];
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const std::uint32_t other = __shfl_xor_sync(0xffffffff, odd ? w[i] : w[i + 1], 1);
    x[i] = odd ? other : w[i];
    x[i + 1] = odd ? w[i + 1] : other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const std::uint32_t other = __shfl_xor_sync(0xffffffff, high ? x[i] : x[i + 2], 2);
    y[i] = high ? other : x[i];
    y[i + 2] = high ? x[i + 2] : other;
  }
  return {y[0], y[1], y[2], y[3]};
}

/// The destination of one finished row of a head.
template <class Result>
struct FinishedRow {
  Result* out;
  float* lse;  // null: not wanted
};
template <class Result>
__device__ FinishedRow<Result> finished_row(const Finished& finished, std::int64_t row, int head) {
  if (!finished.places)
    return {finished.out.template at<Result>(row, head),
            finished.lse.data ? finished.lse.at(row, head) : nullptr};
  const RowPlaces::Stretch& there = finished.places.of(row);
  const std::int64_t at = row - there.begin;
  return {reinterpret_cast<Result*>(there.out) + finished.out.Rows::offset(at, head),
          there.lse + head * there.lse_head_stride + at};
}

/// The epilogue of one row that ends finished, in the dtype of the result.
template <class T>
__device__ void store_finished(const KernelParams& call, const Shared<T>& shared, int stage,
                               int row, const OnlineSoftmax<T>& softmax, int h,
                               const float (&o)[T::kColumns / 2]) {
  const WorkTile& tile = shared.work[stage];
  const Finished& finished = call.finished;
  const bool exists = row < tile.rows;
  Stats stats = softmax.stats(h);
  const float of_o = value_factor<T>(shared, stage, stats.sum, h, o);
  stats.max = lifted<T>(stats.max, shared, stage, row);
  const std::int64_t at = tile.first_row + row;
  float shrunk = 1.0f;
  if (finished.sinks) {
    const Fold sunk = fold(stats, sink_stats(finished.sinks[tile.head]));
    shrunk = sunk.take == Fold::second_high ? sunk.ratio : 1.0f;
    stats = sunk.stats;
  }
  const Finish finish = longspan::finish(stats);
  const float factor = is_empty(stats) ? 0.0f : of_o * shrunk / stats.sum;
  const int t = threadIdx.x % 4;
  using Result = typename T::Result;
  const FinishedRow<Result> to = finished_row<Result>(finished, at, tile.head);
  if (exists && t == 0 && to.lse != nullptr) *to.lse = finish.lse;
#pragma unroll
  for (int j = 0; j < T::kValueDim / 8; j += 4) {
    std::uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int pair =
          j + i < T::kValueDim / 8 ? 4 * (j + i) + 2 * h : 0;  // past the last: not stored
      pairs[i] = pack(o[pair] * factor, o[pair + 1] * factor, Result{});
    }
    const uint4 eight = gather_eight(pairs);
    const int column = 8 * (j + t);
    if (exists && column < value_dim_of<T>(call.params))
      *reinterpret_cast<uint4*>(to.out + column) = eight;
  }
}

}  // namespace longspan::kernels::sm90
