// What all consumer warpgroups of the Hopper kernel share, whatever their elements: their part of
// the pipelines, their turns at the tensor cores, S = Q K^T, the mask, and the epilogue. The main
// loops, which order these steps, are in attend_sm90_16bit.cuh and attend_sm90_fp8.cuh.
//
// A step is a method over the state of a thread and is always inlined, so that S, P and O stay in
// registers. Their arrays are beside the object that has the steps, not in it: a compiler splits an
// object only if all of it is indexed by constants, and loops over an array in it would be unrolled
// too late for the rest to be optimised.
#pragma once

#include "kernels/cuda/arch/store_same.cuh"
#include "kernels/cuda/hopper/attend_sm90_epilogue.cuh"

namespace longspan::kernels::sm90 {

/// S = Q K^T, asynchronously. q, k: panels of 128 bytes of the head's dimension.
template <class T>
__device__ void multiply_qk(float (&s)[T::kKeys / 2], const void* q, const void* k) {
  const std::uint64_t a = opaque(operand(q, 64 * 128)), b = operand(k, T::kPanelBytes);
#pragma unroll
  for (int step = 0; step < T::kDim / T::kStep; ++step)
    Product<T::kKeys>::template shared<typename T::Element, false>(
        s, advance(a, step / 4 * 64 * 128 + step % 4 * 32),
        advance(b, step / 4 * T::kPanelBytes + step % 4 * 32), step > 0);
}

/// Sets scores of keys that a row does not see to `value`. The tile starts at local key `first`.
/// rows: of the work tile; row: the thread's first.
template <int kCount>
__device__ void mask_scores(float (&s)[kCount], float value, int first, const RowKeys* rows,
                            int row) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const RowKeys seen = rows[row + 8 * h];
    const int column = first + 2 * static_cast<int>(threadIdx.x % 4) - seen.begin;
    const unsigned count = seen.end - seen.begin;
#pragma unroll
    for (int i = 2 * h; i < kCount; i += 4) {
      if (static_cast<unsigned>(column + i / 4 * 8) >= count) s[i] = value;
      if (static_cast<unsigned>(column + i / 4 * 8 + 1) >= count) s[i + 1] = value;
    }
  }
}

/// Clears the first `keys` keys of a tile of values: memory that no row may see can hold NaN, and 0
/// NaN is NaN. kThreads threads do it together and share the barrier.
template <class T, int kThreads, int kPanels>
__device__ void clear_keys(typename T::Element (&v)[kPanels][T::kKeys][T::kPanelElements], int keys,
                           int barrier) {
#pragma unroll 1
  for (int panel = 0; panel < kPanels; ++panel)
#pragma unroll 1
    for (int i = threadIdx.x % kThreads; i < keys * 8; i += kThreads)
      store_same(reinterpret_cast<uint4*>(v[panel])[i], uint4{});
  fence_shared_stores();
  named_sync(barrier, kThreads);
}

/// The registers of a consumer's thread.
template <class T>
struct Fragments {
  float (&s)[T::kKeys / 2];                    // scores, then weights
  std::uint32_t (&p)[T::kKeys / T::kStep][4];  // rounded weights
  float (&o)[T::kColumns / 2];
  float (&ratio)[2];  // by which O shrinks
  OnlineSoftmax<T>& softmax;
};

/// A thread of a consumer warpgroup.
template <class T>
struct Consumer : Fragments<T> {
  static constexpr int kTurnBarrier = 1, kGroupBarrier = 1 + T::kConsumers;
  using Fragments<T>::s, Fragments<T>::o, Fragments<T>::softmax;

  __device__ __forceinline__ Consumer(const Fragments<T>& fragments, const KernelParams& of_call,
                                      Shared<T>& of_block, int warpgroup)
      : Fragments<T>(fragments),
        call(of_call),
        shared(of_block),
        group(warpgroup),
        lane(threadIdx.x % 32),
        row(64 * group + 16 * (threadIdx.x / 32 % 4) + lane / 4) {}

  // ---- turns at the tensor cores: one warpgroup at a time issues products

  __device__ __forceinline__ int turn_barrier_of_next() const {
    return kTurnBarrier + (group + 1) % T::kConsumers;
  }
  __device__ __forceinline__ void wait_turn() {
    if (T::kPingPong) named_sync(kTurnBarrier + group, 256);
  }
  __device__ __forceinline__ void pass_turn(int next) {
    if (T::kPingPong) named_arrive(next, 256);
  }

  // ---- pipelines

  __device__ __forceinline__ void release(Barrier& empty) {
    if (lane == 0) empty.arrive();
  }
  /// Returns the number of the work tile's key tiles.
  __device__ __forceinline__ int wait_work() {
    shared.work_full[work.stage].wait(work.parity);
    return shared.work[work.stage].tiles;
  }
  __device__ __forceinline__ void wait_queries() { shared.q_full[group].wait(q_parity); }
  __device__ __forceinline__ void wait_keys() { shared.k_full[k.stage].wait(k.parity); }
  __device__ __forceinline__ void wait_values() { shared.v_full[v.stage].wait(v.parity); }
  __device__ __forceinline__ void release_values() {
    release(shared.v_empty[v.stage]);
    v.advance();
  }
  /// The same as wait_work for the work tile after this one; its queries and first keys have then
  /// arrived.
  __device__ __forceinline__ int wait_next_work() {
    const int tiles = wait_work();
    if (tiles > 0) {
      q_parity ^= 1;
      wait_queries();
      wait_keys();
    }
    return tiles;
  }

  // ---- scores

  __device__ __forceinline__ void begin_scores() {  // S = Q K^T
    wgmma_begin();
    multiply_qk<T>(s, shared.q[group], shared.k[k.stage]);
    wgmma_commit();
  }
  /// last: of the work tile.
  __device__ __forceinline__ void end_scores(bool last) {
    pin(s);
    release(shared.k_empty[k.stage]);
    k.advance();
    if (last) release(shared.q_empty[group]);
  }
  __device__ __forceinline__ bool is_cut() const {  // by the mask or an end of the keys
    return first_key < whole.begin || first_key + T::kKeys > whole.end;
  }
  __device__ __forceinline__ void mask(float value) {
    if (is_cut()) mask_scores(s, value, first_key, shared.rows[work.stage], row);
  }

  // ---- begin and end of a work tile

  __device__ __forceinline__ void begin_work() {
    const WorkTile& tile = shared.work[work.stage];
    first_key = tile.some.end;
    whole = tile.whole;
    softmax = {};
#pragma unroll
    for (int i = 0; i < T::kColumns / 2; ++i) o[i] = 0;
  }
  __device__ __forceinline__ void epilogue(int stage) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (call.finished.out.data)
        store_finished<T>(call, shared, stage, row + 8 * h, softmax, h, o);
      else
        store_state<T>(call, shared, stage, row + 8 * h, softmax, h, o);
    }
    shared.work_empty[stage].arrive();
  }

  const KernelParams& call;
  Shared<T>& shared;
  const int group;  // index of the consumer warpgroup
  const int lane;
  const int row;  // of the work tile; the thread's second row is row + 8

  RowKeys whole{};        // keys that every row of the work tile sees
  int first_key = 0;      // local key at which the tile of s begins
  PipelineState<2> work;  // the work tile
  PipelineState<T::kStages> k, v;
  std::uint32_t q_parity = 0;
};

/// Runs the main loop of one consumer.
template <template <class> class MainLoop, class T>
__device__ __forceinline__ void consume(const KernelParams& call, Shared<T>& shared, int group) {
  float s[T::kKeys / 2], o[T::kColumns / 2], ratio[2];
  std::uint32_t p[T::kKeys / T::kStep][4];
  OnlineSoftmax<T> softmax;
  MainLoop<T>({s, p, o, ratio, softmax}, call, shared, group).run();
}

}  // namespace longspan::kernels::sm90
