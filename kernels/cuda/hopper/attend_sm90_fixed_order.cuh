// The consumers' main loop in the fixed order (longspan/order.hpp), in which the bits of a row are
// those of one expression, whichever rank holds its keys. A tile of keys is a segment. It has one
// maximum, one sum, and a product of weights and values that starts from zero, and its state folds
// with waiting states:
//
//     S = Q K^T    m = max c S    P = exp2(c S - m)    l = sum P    O = P V    merge, merge ...
//
// A warpgroup issues the scores of the next segment after the values of this one, and folds with
// states in memory while they are computed. Its softmax runs beside the products of the other
// warpgroup: they take turns. (With the softmax beside the own values, as in attend_sm90_16bit.cuh,
// no registers would be left for a waiting state.) Of the waiting states, half are in registers, a
// quarter in shared memory, a quarter in memory that stays in L2 (fold_plan.cuh). A state of 128
// rows at dim 128 takes as many bytes as the keys and values of a segment, so all of them in L2
// would be twice the traffic of those, and more than L2 can serve.
#pragma once

#include "kernels/cuda/combine/row_epilogue.cuh"
#include "kernels/cuda/hopper/attend_sm90_16bit.cuh"

namespace longspan::kernels::sm90 {

using cuda::FoldStep;
using cuda::Waits;

/// How two states of a row merge. It gives the bits of longspan::fold, with selections instead of
/// branches.
struct Merging {
  bool newer_leads, alone;
  float ratio;
  Stats stats;

  __device__ Merging(const Stats& older, const Stats& newer)
      : newer_leads(is_empty(older) | (!is_empty(newer) & !(older.max >= newer.max))),
        alone(is_empty(older) | is_empty(newer)) {
    const Stats high = newer_leads ? newer : older, low = newer_leads ? older : newer;
    ratio = ::exp2f(low.max - high.max);
    stats = {is_empty(high) ? -infinity() : high.max,
             alone ? high.sum : ::fmaf(low.sum, ratio, high.sum)};
  }

  __device__ float operator()(float older, float newer) const {
    const float high = newer_leads ? newer : older, low = newer_leads ? older : newer;
    return alone ? high : ::fmaf(low, ratio, high);
  }
};

/// The statistics of a thread's two rows.
struct RowStats {
  Stats first, second;
};

/// They are the same in the four lanes that share the rows; each lane may keep one number.
__device__ inline float spread(const RowStats& rows) {
  const int t = threadIdx.x % 4;
  const float max = t < 2 ? rows.first.max : rows.second.max;
  const float sum = t < 2 ? rows.first.sum : rows.second.sum;
  return t % 2 == 0 ? max : sum;
}
__device__ inline RowStats gather(float number) {
  const int first = threadIdx.x % 32 & ~3;
  const auto of = [&](int lane) { return __shfl_sync(0xffffffff, number, first + lane); };
  const float max = of(0), sum = of(1), second_max = of(2), second_sum = of(3);
  return {{max, sum}, {second_max, second_sum}};
}

template <class T>
class ConsumerInOrder : Consumer<T> {
  using Base = Consumer<T>;
  using Accumulators = float[T::kDim / 2];
  using Quads = float4[T::kStateThreads];  // four elements of each thread's O
  using Base::call, Base::shared, Base::group, Base::row, Base::work, Base::k;
  using Base::s, Base::p, Base::o, Base::ratio, Base::softmax, Base::first_key, Base::whole;

 public:
  __device__ __forceinline__ ConsumerInOrder(const Fragments<T>& fragments, Accumulators& second,
                                             const KernelParams& call, Shared<T>& shared, int group)
      : Base(fragments, call, shared, group), second_(second) {}

  __device__ __forceinline__ void run() {
    if (group == T::kConsumers - 1) pass_turn();  // the first consumer begins
    if (!wait_work()) return;
    begin_scores();
    for (;;) {
      FoldStep step = attend_segment<false>();
      fold_waiting(step);
      while (step.then() == Waits::held) {  // in o
        held_ = spread(newest_);
        step = attend_segment<true>();
        fold_waiting(step);
      }
      if (step.then() == Waits::nowhere) {
        epilogue(at_.work_stage() ^ 1);
        if (shared.work[at_.work_stage()].tiles == 0) break;
      } else {
        store(step.then());
      }
    }
    wgmma_wait<0>();
  }

 private:
  /// The progress of the consumer, in one register.
  struct Progress {
    // Bits 0 and 1: the segment whose scores are in flight, counted; 2 and 3: its work tile; from 4
    // on: the number of states that wait far.
    unsigned bits = 0;

    __device__ int stage() const { return bits & 1; }
    __device__ unsigned parity() const { return bits >> 1 & 1; }
    __device__ int work_stage() const { return bits >> 2 & 1; }
    __device__ unsigned work_parity() const { return bits >> 3 & 1; }
    __device__ int far() const { return static_cast<int>(bits >> 4); }
    __device__ void next_segment() { bits = (bits & ~3u) | ((bits + 1) & 3); }
    __device__ void next_work() { bits = (bits & ~12u) | ((bits + 4) & 12); }
    __device__ void add_far(int states) { bits += static_cast<unsigned>(states) * 16; }
  };

  __device__ __forceinline__ void pass_turn() { Base::pass_turn(Base::turn_barrier_of_next()); }

  /// Waits for the work tile, its queries and its first keys. Returns whether there is one.
  __device__ __forceinline__ bool wait_work() {
    const int stage = at_.work_stage();
    shared.work_full[stage].wait(at_.work_parity());
    const bool found = shared.work[stage].tiles > 0;
    if (found) {
      shared.q_full[group].wait(stage);
      wait_keys();
    }
    return found;
  }
  __device__ __forceinline__ void wait_keys() { shared.k_full[at_.stage()].wait(at_.parity()); }
  __device__ __forceinline__ void begin_scores() {
    k.stage = at_.stage();
    Base::begin_scores();
  }

  /// Attends the segment whose scores are in flight, and issues those of the next one. The newest
  /// state, in o and newest_, is that of the segment, or, with kMeetsHeld, its merge with the state
  /// that is held in o.
  template <bool kMeetsHeld>
  __device__ __forceinline__ FoldStep attend_segment() {
    wgmma_wait<0>();
    const FoldStep step = end_scores();
    make_weights();
    if constexpr (kMeetsHeld) {
      const Mergings mergings(newest_, gather(held_));
      multiply_values(second_);
#pragma unroll
      for (int i = 0; i < T::kDim / 2; ++i) o[i] = mergings.of(i)(o[i], second_[i]);
    } else {
      multiply_values(o);
    }
    at_.next_segment();
    const bool last = step.then() == Waits::nowhere;
    if (!last) {
      wait_keys();
    } else {
      // The first scores of the next work tile, which may not be there yet, so the turn ends
      // before. After the last one they are unused, but ptxas wants no branch around them.
      pass_turn();
      at_.next_work();
      wait_work();
    }
    begin_scores();
    if (!last) pass_turn();
    return step;
  }

  __device__ __forceinline__ FoldStep end_scores() {
    const int stage = at_.stage();
    first_key = shared.waiting.segments[stage].first_key;
    const FoldStep step = shared.waiting.segments[stage].step;
    __syncwarp();  // every lane has read the segment
    pin(s);
    Base::release(shared.k_empty[stage]);
    if (step.then() == Waits::nowhere) Base::release(shared.q_empty[group]);
    return step;
  }

  /// s becomes weights, and newest_ the statistics of the segment.
  __device__ __forceinline__ void make_weights() {
    work.stage = at_.work_stage();
    whole = shared.work[work.stage].whole;
    Base::mask(-INFINITY);
    softmax = {};
    softmax.update(s, score_factor<T>(call), ratio);
    newest_ = {softmax.stats(0), softmax.stats(1)};
    round_weights<typename T::Element>(p, s);
  }

  /// product = P V. A turn at the tensor cores begins here.
  __device__ __forceinline__ void multiply_values(Accumulators& product) {
    const int stage = at_.stage();
    // The turn's barrier is behind this wait, which is a loop: ptxas moves a barrier to the start
    // of its basic block, and the weights would otherwise be computed within the turn.
    shared.v_full[stage].wait(at_.parity());
    Base::wait_turn();
    forget(product);
    wgmma_begin();
    multiply_pv<T>(product, p, shared.v[stage], false);
    wgmma_commit();
    wgmma_wait<0>();
    pin(product);
    Base::release(shared.v_empty[stage]);
  }

  // ---- states

  /// The newest state, in o, folds with those that wait near and far.
  __device__ __forceinline__ void fold_waiting(FoldStep step) {
    if (step.takes_near()) merge(Mergings(newest_, gather(near_)), shared.waiting.near);
#pragma unroll 1
    for (int n = step.takes_far(); n > 0; --n) {
      at_.add_far(-1);
      const Quads* const from = far(at_.far());
      const float4 rows = from[T::kQuads][own()];
      merge(Mergings(newest_, {{rows.x, rows.y}, {rows.z, rows.w}}), from);
    }
  }

  /// Stores the newest state near or far.
  __device__ __forceinline__ void store(Waits where) {
    if (where == Waits::near) {
      near_ = spread(newest_);
      store(shared.waiting.near);
    } else {
      Quads* const to = far(at_.far());
      at_.add_far(1);
      store(to);
      to[T::kQuads][own()] =
          make_float4(newest_.first.max, newest_.first.sum, newest_.second.max, newest_.second.sum);
    }
  }
  __device__ __forceinline__ void store(Quads* to) const {
#pragma unroll
    for (int i = 0; i < T::kQuads; ++i)
      to[i][own()] = make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
  }

  /// How the thread's two rows merge with an older state. It turns their statistics into those of
  /// the merged one.
  struct Mergings {
    const Merging first, second;

    __device__ __forceinline__ Mergings(RowStats& newest, const RowStats& older)
        : first(older.first, newest.first), second(older.second, newest.second) {
      newest = {first.stats, second.stats};
    }
    __device__ __forceinline__ const Merging& of(int element) const {
      return element % 4 < 2 ? first : second;
    }
  };

  /// o = merge(the state that a thread has stored there, o), in batches, behind branches that are
  /// always taken: ptxas moves no load above a branch, and would otherwise keep more of them in
  /// flight than there are registers.
  template <int kBegin = 0>
  __device__ __forceinline__ void merge(const Mergings& mergings, const Quads* from) {
    constexpr int kBatch = 8, kEnd = T::kQuads,
                  kStop = kBegin + kBatch < kEnd ? kBegin + kBatch : kEnd;
    float4 four[kStop - kBegin];
#pragma unroll
    for (int i = kBegin; i < kStop; ++i) four[i - kBegin] = from[i][own()];
#pragma unroll
    for (int i = 4 * kBegin; i < 4 * kStop; i += 4) {
      const float4 older = four[i / 4 - kBegin];
      o[i] = mergings.first(older.x, o[i]);
      o[i + 1] = mergings.first(older.y, o[i + 1]);
      o[i + 2] = mergings.second(older.z, o[i + 2]);
      o[i + 3] = mergings.second(older.w, o[i + 3]);
    }
    if constexpr (kStop < kEnd)
      if (opaque(1) != 0) merge<kStop>(mergings, from);
  }

  /// The index of the thread among the consumers'.
  __device__ __forceinline__ static int own() { return static_cast<int>(threadIdx.x) - 128; }

  /// The state that waits far with `depth` older ones; its statistics are after its O.
  __device__ __forceinline__ Quads* far(int depth) const {
    const std::int64_t state = std::int64_t{blockIdx.x} * call.sources.depth + depth;
    return reinterpret_cast<Quads*>(call.sources.stack + state * T::kStateBytes);
  }

  // ---- the end of a work tile

  __device__ __forceinline__ void epilogue(int stage) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (call.finished.out.data)
        divide_and_store(stage, h);
      else
        store_merged(stage, h);
    }
    shared.work_empty[stage].arrive();
  }

  /// Stores the state of one row. A row that starts from a state folds with it here.
  __device__ __forceinline__ void store_merged(int stage, int h) {
    const WorkTile& tile = shared.work[stage];
    const AttendParams& params = call.params;
    const bool exists = row + 8 * h < tile.rows;
    const std::int64_t at =
        exists ? static_cast<std::int64_t>(tile.first_row + row + 8 * h) * params.heads + tile.head
               : 0;
    const int t = threadIdx.x % 4;
    Stats& place = params.state.stats(params.slot)[at];
    float* const to = params.state.o(params.slot, at) + 2 * t;
    const Stats before = params.resume && exists ? place : empty_stats();
    __syncwarp();  // all four lanes have read what one writes
    const Merging merged(before, h == 0 ? newest_.first : newest_.second);
    if (!exists) return;
    if (t == 0) place = merged.stats;
#pragma unroll
    for (int j = 0; j < T::kDim / 8; ++j)
      if (8 * j < params.head_dim) {
        float2& pair = *reinterpret_cast<float2*>(to + 8 * j);
        float2 own{o[4 * j + 2 * h], o[4 * j + 2 * h + 1]};
        if (params.resume) {
          const float2 older = pair;
          own = {merged(older.x, own.x), merged(older.y, own.y)};
        }
        pair = own;
      }
  }

  /// Stores one finished row, with the steps and bits of RowEpilogue, which finishes rows with
  /// states of several ranks.
  __device__ __forceinline__ void divide_and_store(int stage, int h) {
    using Result = typename T::Result;
    const WorkTile& tile = shared.work[stage];
    const Finished& finished = call.finished;
    const bool exists = row + 8 * h < tile.rows;
    const std::int64_t at = tile.first_row + row + 8 * h;
    const Stats stats = h == 0 ? newest_.first : newest_.second;
    Fold sunk{stats, 0.0f, Fold::first};
    if (finished.sinks) sunk = longspan::fold(stats, sink_stats(finished.sinks[tile.head]));
    const Finish finish = longspan::finish(sunk.stats);
    const int t = threadIdx.x % 4;
    if (exists && t == 0 && finished.lse.data) *finished.lse.at(at, tile.head) = finish.lse;
    Result* const to = finished.out.template at<Result>(at, tile.head);
    constexpr int kEights = 2;  // of columns that the thread divides at a time
    float columns[8 * kEights];
#pragma unroll
    for (int j = 0; j < T::kDim / 8; j += 4) {
      if (j / 4 % kEights == 0) {
#pragma unroll
        for (int i = 0; i < 8 * kEights; ++i)
          columns[i] = sunk(o[4 * j + i / 2 * 4 + 2 * h + i % 2], 0.0f);
        cuda::divide(columns, finish.sum);
      }
      std::uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const pair = columns + j / 4 % kEights * 8 + 2 * i;
        pairs[i] = pack(pair[0], pair[1], Result{});
      }
      const uint4 eight = gather_eight(pairs);
      const int column = 8 * (j + t);
      if (exists && column < call.params.head_dim) *reinterpret_cast<uint4*>(to + column) = eight;
    }
  }

  Accumulators& second_;  // of a segment while an older state is held in o
  Progress at_;
  float held_ = 0, near_ = 0;  // the statistics of the held state and of the one that waits near,
                               // spread
  RowStats newest_;            // those of the newest state
};

template <class T>
__device__ __forceinline__ void consume_in_order(const KernelParams& call, Shared<T>& shared,
                                                 int group) {
  float s[T::kKeys / 2], o[T::kDim / 2], second[T::kDim / 2], ratio[2];
  std::uint32_t p[T::kKeys / T::kStep][4];
  OnlineSoftmax<T> softmax;
  ConsumerInOrder<T>({s, p, o, ratio, softmax}, second, call, shared, group).run();
}

}  // namespace longspan::kernels::sm90
