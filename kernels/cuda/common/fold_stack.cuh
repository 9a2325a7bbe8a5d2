// States in registers, and the stack on which they wait for their sibling in the fixed order's tree
// (fixed_order.cuh). Every thread keeps its own part of a state, in memory of the thread block that
// stays in L2. No thread reads another's writes, so the stack needs no barrier.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/fixed_order.cuh"

namespace longspan::kernels::cuda {

/// A thread's part of the states of kRows rows: kQuads x 4 elements of o, in the order of an mma's
/// accumulator. RowOf::row(quad, i) is the row that element i of a quad belongs to.
template <int kRowCount, int kQuadCount, class RowOf>
struct ThreadState {
  static constexpr int kRows = kRowCount;
  static constexpr int kQuads = kQuadCount;
  static constexpr int kVectors = kQuads + (kRows + 1) / 2;  // of 16 bytes

  Stats stats[kRows];
  float o[kQuads][4];

  __device__ void clear() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) stats[r] = empty_stats();
#pragma unroll
    for (int q = 0; q < kQuads; ++q)
#pragma unroll
      for (int i = 0; i < 4; ++i) o[q][i] = 0.0f;
  }

  __device__ float4 quad(int q) const { return make_float4(o[q][0], o[q][1], o[q][2], o[q][3]); }

  /// Computes this = merge(stored, this), quad by quad: `quad(q)` gives the stored state's elements
  /// and `row(r)` its scalars.
  template <class Quad, class Row>
  __device__ void merge(const Quad& quad, const Row& row) {
    // A quad belongs to at most two rows, so two rows at a time keep few numbers in registers.
#pragma unroll
    for (int r = 0; r < kRows; r += 2) {
      Fold folds[2];
#pragma unroll
      for (int i = 0; i < 2 && r + i < kRows; ++i) {
        folds[i] = fold(row(r + i), stats[r + i]);
        stats[r + i] = folds[i].stats;
      }
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        if (RowOf::row(q, 0) / 2 != r / 2) continue;
        const float4 stored = quad(q);
        const auto add = [&](int i, float older) {
          o[q][i] = folds[RowOf::row(q, i) % 2](older, o[q][i]);
        };
        add(0, stored.x);
        add(1, stored.y);
        add(2, stored.z);
        add(3, stored.w);
      }
    }
  }

  /// The same bits with selections instead of branches, so that the rows fold side by side.
  template <class Quad, class Row>
  __device__ __forceinline__ void merge_by_selection(const Quad& quad, const Row& row) {
    float ratio[kRows];
    bool newer_leads[kRows], alone[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Stats a = row(r), b = stats[r];
      newer_leads[r] = is_empty(a) || (!is_empty(b) && !(a.max >= b.max));
      alone[r] = is_empty(a) || is_empty(b);  // the side that leads is then the result
      const Stats high = newer_leads[r] ? b : a, low = newer_leads[r] ? a : b;
      ratio[r] = fold_ratio(low.max, high.max);
      stats[r].max = is_empty(high) ? -infinity() : high.max;
      stats[r].sum = alone[r] ? high.sum : ::fmaf(low.sum, ratio[r], high.sum);
    }
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const float4 stored = quad(q);
      const auto add = [&](int i, float older) {
        const int r = RowOf::row(q, i);
        const float leading = newer_leads[r] ? o[q][i] : older;
        const float other = newer_leads[r] ? older : o[q][i];
        o[q][i] = alone[r] ? leading : ::fmaf(other, ratio[r], leading);
      };
      add(0, stored.x);
      add(1, stored.y);
      add(2, stored.z);
      add(3, stored.w);
    }
  }
};

/// Stores a thread's part of a state, as vectors that are kThreads apart.
template <int kThreads, class State>
__device__ inline void store_state(float4* to, const State& state) {
#pragma unroll
  for (int r = 0; r < State::kRows; r += 2) {
    const Stats second = r + 1 < State::kRows ? state.stats[r + 1] : empty_stats();
    to[(r / 2) * kThreads] =
        make_float4(state.stats[r].max, state.stats[r].sum, second.max, second.sum);
  }
  to += (State::kRows + 1) / 2 * kThreads;
#pragma unroll
  for (int q = 0; q < State::kQuads; ++q) to[q * kThreads] = state.quad(q);
}

/// Computes newest = merge(the state that store_state wrote, newest).
template <int kThreads, class State>
__device__ inline void merge_state(const float4* from, State& newest) {
  const float4* quads = from + (State::kRows + 1) / 2 * kThreads;
  newest.merge([&](int q) { return quads[q * kThreads]; },
               [&](int r) {
                 const float4 pair = from[(r / 2) * kThreads];
                 return r % 2 == 0 ? Stats{pair.x, pair.y} : Stats{pair.z, pair.w};
               });
}

/// Multiplies o by the scale of the stored values. This is done to each segment before it folds, so
/// that the fixed order's bits do not depend on the cut between ranks.
template <class State>
__device__ inline void scale_values(State& state, const ScaleView& scales, int sequence,
                                    int kv_head) {
  if (!scales) return;
  const float scale = scales.of(sequence, kv_head);
#pragma unroll
  for (int q = 0; q < State::kQuads; ++q)
#pragma unroll
    for (int i = 0; i < 4; ++i) state.o[q][i] = __fmul_rn(state.o[q][i], scale);
}

template <class State, int kThreads>
class FoldStack {
 public:
  /// The bytes of one state of one thread block.
  static constexpr std::size_t kStateBytes = std::size_t{16} * State::kVectors * kThreads;

  /// `depth` is the most states that wait at a time.
  __device__ FoldStack(float* stack, int depth)
      : memory_(reinterpret_cast<float4*>(stack) +
                static_cast<std::int64_t>(blockIdx.x) * depth * State::kVectors * kThreads +
                threadIdx.x) {}

  /// Makes `newest` the state of its subtree of 2^level places, which waits on that level.
  __device__ void finish_subtree(State& newest, int level) {
    fold_below(newest, level);
    store_state<kThreads>(at(__popc(waiting_)), newest);
    waiting_ |= 1u << level;
  }

  /// Makes `newest` the state of everything since the last call.
  __device__ void fold_all(State& newest) { fold_below(newest, 32); }

 private:
  __device__ void fold_below(State& newest, int level) {
    while (waiting_ != 0) {
      const int lowest = __ffs(static_cast<int>(waiting_)) - 1;  // the newest waiting state
      if (lowest >= level) return;
      waiting_ &= waiting_ - 1;
      merge_state<kThreads>(at(__popc(waiting_)), newest);
    }
  }

  __device__ float4* at(int depth) const {
    return memory_ + static_cast<std::int64_t>(depth) * State::kVectors * kThreads;
  }

  float4* memory_;
  std::uint32_t waiting_ = 0;  // bit k: a state waits on level k
};

}  // namespace longspan::kernels::cuda
