// Attention of short queries over 16-bit pages and odd layouts: a block's four warps share a
// segment. Contiguous rows and fp8 have a faster kernel, attend_decode.cuh. Keys are the long side
// of every product, so that a group's few rows waste nothing:
//
//     S^T = K Q^T   (a warp: 16 keys of each chunk, all rows)
//     O^T = V^T P^T (a warp: its slices of dim, all keys and rows)
//
// P passes from one form to the other through shared memory. Chunks of 64 keys, K K V V for each
// segment of 128, stream through a ring of cp.async stages with one barrier a chunk. A segment's
// state is small; segments fold in the fixed order, always. A block takes an aligned part of the
// order's tree (a split), so the number of splits fills the GPU and never changes a bit.
//
// Pages: decode_block_pages.cuh.
#pragma once

#include "kernels/cuda/attend.hpp"
#include "kernels/cuda/bias.cuh"
#include "kernels/cuda/decode_block_pages.cuh"
#include "kernels/cuda/decode_stack.cuh"
#include "kernels/cuda/fold_stack.cuh"
#include "kernels/cuda/instances/dims.hpp"
#include "kernels/cuda/loader.cuh"
#include "kernels/cuda/view.cuh"

namespace longspan::kernels::cuda::block {

// ---- traits ---------------------------------------------------------------------------------

template <class T, int kHeadDim, int kRowCount, Loader kKeyLoader>
struct DecodeTraits {
  using Element = T;
  static constexpr Loader kLoader = kKeyLoader;
  static constexpr bool kPlain = kLoader == Loader::plain;  // no pages, no scales, no bias
  static constexpr bool kPaged = kLoader == Loader::any16;  // looks pages up ahead
  static constexpr int kDim = kHeadDim;
  static constexpr int kRows = kRowCount;  // packed rows: 8, 16 or 32
  static constexpr int kRowTiles = kRows / 8;
  static constexpr int kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kKeys = 64;   // in a chunk
  static constexpr int kChunks = 4;  // of a segment: K K V V
  // As many stages as let two blocks share a multiprocessor of 227 KB.
  static constexpr int kStages = kDim <= 64    ? 8
                                 : kDim <= 128 ? (kRows == 8 ? 6 : 5)
                                 : kDim <= 192 ? 4
                                               : 3;
  static constexpr int kAhead = kStages - 1;                         // chunks under way
  static constexpr int kSlices = (kDim / 16 + kWarps - 1) / kWarps;  // m16 slices of dim of a warp
  static_assert(kKeys == 16 * kWarps && kSegment == 2 * kKeys && kSegment == kThreads);

  static constexpr int kChunkBytes = kKeys * kDim * 2;
  static constexpr int kQueryBytes = kRows * kDim * 2;
  static constexpr int kWeightStride = kSegment + 8;  // of a row of P: shifts each row by a bank
  static constexpr int kWeightBytes = kRows * kWeightStride * 2;
  static constexpr int kStatsBytes = 2 * kWarps * kRows * 4;
  static constexpr int kPlaceLead = place_lead(kAhead, kChunks);  // segments, see decode_pages.cuh
  static constexpr int kPlaceSlots = kPlaceLead + 1;              // of a segment's places each
  static constexpr int kQueue = kPaged && kPlaceSlots > 3 ? kPlaceSlots : 3;  // segments known
  static constexpr int kPlaceBytes = kPaged ? kPlaceSlots * kSegment * 8 : 0;
  static constexpr int kRowBytes = kPlain ? 0 : kRows * static_cast<int>(sizeof(PackedRow));
  static constexpr int kSharedBytes = kStages * kChunkBytes + kQueryBytes + kWeightBytes +
                                      kStatsBytes + kPlaceBytes + kRowBytes +
                                      kRows * static_cast<int>(sizeof(Interval)) + 16;

  struct RowOf {  // quad = slice * kRowTiles + row tile; rows 2t, 2t + 1 of each row tile
    __device__ static constexpr int row(int quad, int i) { return quad % kRowTiles * 2 + i % 2; }
  };
  using State = ThreadState<2 * kRowTiles, kSlices * kRowTiles, RowOf>;
  static constexpr int kLow = kRows == 8 ? 3 : 0;  // levels in registers: small states only
  using Stack = DecodeStack<State, kThreads, kLow>;
};

/// Shared memory of a block, in the order of alignment.
template <class Traits>
struct DecodeShared {
  std::uint32_t ring;                 // [kStages] chunks
  std::uint32_t queries;              // tile [kRows, kDim]
  typename Traits::Element* weights;  // P [kRows, kWeightStride]
  float* top;                         // [kWarps, kRows] maxima of the warps' keys
  float* sum;                         // [kWarps, kRows]
  Interval* views;                    // [kRows]
  KeyPlace* places;                   // [kPlaceSlots, kSegment], in turn
  PackedRow* rows;                    // [kRows], for biases
  int* index;                         // of the next piece of work
  float* scales;                      // [2] of the kv head: of scores, of values; not if plain

  __device__ explicit DecodeShared(std::byte* memory) {
    ring = arch::shared_address(memory);
    queries = ring + Traits::kStages * Traits::kChunkBytes;
    memory += Traits::kStages * Traits::kChunkBytes + Traits::kQueryBytes;
    views = reinterpret_cast<Interval*>(memory);
    memory += Traits::kRows * sizeof(Interval);
    places = reinterpret_cast<KeyPlace*>(memory);
    memory += Traits::kPlaceBytes;
    rows = reinterpret_cast<PackedRow*>(memory);
    memory += Traits::kRowBytes;
    top = reinterpret_cast<float*>(memory);
    sum = top + Traits::kWarps * Traits::kRows;
    weights = reinterpret_cast<typename Traits::Element*>(sum + Traits::kWarps * Traits::kRows);
    index = reinterpret_cast<int*>(weights + Traits::kRows * Traits::kWeightStride);
    scales = reinterpret_cast<float*>(index + 1);
  }
};

// ---- steps ----------------------------------------------------------------------------------

/// The segments that are loaded, looked up or in work: the one in work and the next ones.
template <int kEntries>
struct SegmentQueue {
  struct Entry {
    std::int64_t place;
    std::int64_t segment;  // < 0: none
  };
  Entry entry[kEntries];

  __device__ static Entry take(SegmentWalk& walk) {
    if (!walk.next()) return {0, -1};
    return {walk.place, walk.segment};
  }
  __device__ explicit SegmentQueue(SegmentWalk& walk) {
#pragma unroll
    for (Entry& e : entry) e = {0, -1};
#pragma unroll 1
    for (int i = 0; i < kEntries; ++i) step(walk);
  }
  /// Of one of the first three, that may be known at run time only: by selection, not from an array
  /// in memory.
  __device__ std::int64_t segment(int i) const {
    return i == 0 ? entry[0].segment : i == 1 ? entry[1].segment : entry[2].segment;
  }
  __device__ void step(SegmentWalk& walk) {
#pragma unroll
    for (int i = 0; i + 1 < kEntries; ++i) entry[i] = entry[i + 1];
    entry[kEntries - 1] = take(walk);
  }
};

/// A chunk of keys in the loader's own way. Only the plain one, which is a few instructions, is
/// worth a copy at each of the places that load. By value: the kernel's own stay in registers.
template <class Traits>
__device__ __noinline__ void load_chunk_apart(std::uint32_t tile, const KvRows& source,
                                              const AttendParams& p, int kv_head, Sequence sequence,
                                              View view, std::int64_t first) {
  load_keys<typename Traits::Element, Traits::kDim, Traits::kKeys, Traits::kThreads,
            Traits::kLoader>(tile, source, p, kv_head, sequence, view, first);
}

template <class Traits>
__device__ inline void load_chunk(std::uint32_t tile, const KvRows& source, const AttendParams& p,
                                  int kv_head, const Sequence& sequence, const View& view,
                                  std::int64_t first) {
  if constexpr (Traits::kPlain)
    load_keys<typename Traits::Element, Traits::kDim, Traits::kKeys, Traits::kThreads,
              Loader::plain>(tile, source, p, kv_head, sequence, view, first);
  else
    load_chunk_apart<Traits>(tile, source, p, kv_head, sequence, view, first);
}

/// s += K Q^T for one chunk: the warp's 16 keys, all rows.
template <class Traits>
__device__ inline void multiply_chunk_keys(float (&s)[Traits::kRowTiles][4], std::uint32_t keys,
                                           std::uint32_t queries) {
  using T = typename Traits::Element;
  using Layout = Tile<T, Traits::kDim>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int k = 0; k < Traits::kDim / 16; k += 2) {
    std::uint32_t a[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      arch::load_matrices(a[half],
                          keys + Layout::offset(warp * 16 + lane % 16, 2 * (k + half) + lane / 16));
#pragma unroll
    for (int n = 0; n < Traits::kRowTiles; ++n) {
      std::uint32_t b[4];  // dims 16 k ... 16 k + 31 of eight rows
      arch::load_matrices(b, queries + Layout::offset(n * 8 + lane % 8, 2 * k + lane / 8));
      arch::mma<T>(s[n], a[0], b[0], b[1]);
      arch::mma<T>(s[n], a[1], b[2], b[3]);
    }
  }
}

/// Products -> scores in base 2; -inf where the row does not see the key.
template <class Traits>
__device__ inline void score_segment(float (&s)[2][Traits::kRowTiles][4], const AttendParams& p,
                                     const DecodeShared<Traits>& shared, const View& view,
                                     const Sequence& sequence, std::int64_t first) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto row_of = [&](int n, int j) { return n * 8 + lane % 4 * 2 + j; };
  const auto key_of = [&](int c, int half) {
    return first + c * Traits::kKeys + warp * 16 + half * 8 + lane / 4;
  };
  const bool full = view.full(first, kSegment);
  Score score = p.score;
  if constexpr (!Traits::kPlain) score.scale = shared.scales[0];
#pragma unroll
  for (int c = 0; c < 2; ++c)
#pragma unroll
    for (int n = 0; n < Traits::kRowTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[c][n][i] = score(s[c][n][i]);
  if (!full) {
#pragma unroll
    for (int n = 0; n < Traits::kRowTiles; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const Interval row = shared.views[row_of(n, j)];
#pragma unroll
        for (int c = 0; c < 2; ++c)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            if (!sees(view, row, key_of(c, half))) s[c][n][half * 2 + j] = -infinity();
      }
  }
  if constexpr (!Traits::kPlain) {
    if (!p.bias) return;
    int columns[2][2];
#pragma unroll
    for (int c = 0; c < 2; ++c)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        columns[c][half] = key_column(p, sequence, view, key_of(c, half));
#pragma unroll
    for (int n = 0; n < Traits::kRowTiles; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const RowBias bias(p.bias, shared.rows[row_of(n, j)]);
#pragma unroll
        for (int c = 0; c < 2; ++c)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float& x = s[c][n][half * 2 + j];
            const int column = columns[c][half];
            x = RowBias::add(x, bias.alibi(column) + bias.qq(column));
          }
      }
  }
}

/// Scores -> P in shared memory, and the segment's maxima and sums in `stats`. Lanes, then warps,
/// in one order.
template <class Traits>
__device__ inline void weigh_segment(float (&s)[2][Traits::kRowTiles][4],
                                     const DecodeShared<Traits>& shared,
                                     Stats (&stats)[2 * Traits::kRowTiles]) {
  using T = typename Traits::Element;
  constexpr int kRows = Traits::kRows;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto row_of = [&](int n, int j) { return n * 8 + lane % 4 * 2 + j; };
#pragma unroll
  for (int n = 0; n < Traits::kRowTiles; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float top = fmaxf(fmaxf(s[0][n][j], s[0][n][2 + j]), fmaxf(s[1][n][j], s[1][n][2 + j]));
#pragma unroll
      for (int step = 4; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
      if (lane < 4) shared.top[warp * kRows + row_of(n, j)] = top;
    }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < Traits::kRowTiles; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = row_of(n, j);
      float top = shared.top[row];
#pragma unroll
      for (int w = 1; w < Traits::kWarps; ++w) top = fmaxf(top, shared.top[w * kRows + row]);
      stats[2 * n + j].max = top;
      const float from = top == -infinity() ? 0.0f : top;  // nothing visible: P = 0
      float sum = 0.0f;
#pragma unroll
      for (int c = 0; c < 2; ++c)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float weight = arch::exp2_fast(__fadd_rn(s[c][n][half * 2 + j], -from));
          sum = __fadd_rn(sum, weight);
          shared.weights[row * Traits::kWeightStride + c * Traits::kKeys + warp * 16 + half * 8 +
                         lane / 4] = static_cast<T>(weight);
        }
#pragma unroll
      for (int step = 4; step < 32; step *= 2)
        sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, step));
      if (lane < 4) shared.sum[warp * kRows + row] = sum;
    }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < Traits::kRowTiles; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float* sum = shared.sum + row_of(n, j);
      static_assert(Traits::kWarps == 4);
      stats[2 * n + j].sum =
          __fadd_rn(__fadd_rn(sum[0], sum[kRows]), __fadd_rn(sum[2 * kRows], sum[3 * kRows]));
    }
}

/// O^T += V^T P^T for chunk `chunk` (0 or 1) of the segment: the warp's slices of dim.
template <class Traits>
__device__ inline void multiply_chunk_values(typename Traits::State& state, std::uint32_t values,
                                             std::uint32_t weights, int chunk) {
  using T = typename Traits::Element;
  using Layout = Tile<T, Traits::kDim>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int k = 0; k < Traits::kKeys / 16; k += 2) {
    std::uint32_t b[Traits::kRowTiles][4];  // keys 16 k ... 16 k + 31 of eight rows
#pragma unroll
    for (int n = 0; n < Traits::kRowTiles; ++n)
      arch::load_matrices(b[n], weights + ((n * 8 + lane % 8) * Traits::kWeightStride +
                                           chunk * Traits::kKeys + k * 16 + lane / 8 * 8) *
                                              2);
#pragma unroll
    for (int slice = 0; slice < Traits::kSlices; ++slice) {
      const int m = warp + slice * Traits::kWarps;
      if (Traits::kDim / 16 % Traits::kWarps != 0 && m >= Traits::kDim / 16) break;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        std::uint32_t a[4];
        arch::load_matrices_transposed(
            a, values + Layout::offset((k + half) * 16 + lane % 8 + lane / 16 * 8,
                                       2 * m + lane / 8 % 2));
#pragma unroll
        for (int n = 0; n < Traits::kRowTiles; ++n)
          arch::mma<T>(state.o[slice * Traits::kRowTiles + n], a, b[n][2 * half],
                       b[n][2 * half + 1]);
      }
    }
  }
}

/// As scale_values, by a scale that is at hand.
template <class State>
__device__ inline void scale_state(State& state, float scale) {
#pragma unroll
  for (auto& quad : state.o)
#pragma unroll
    for (float& o : quad) o = __fmul_rn(o, scale);
}

template <class Traits>
__device__ inline void store_columns(const AttendParams& p, const Plan& plan,
                                     const Sequence& sequence, const Work& work,
                                     const typename Traits::State& state) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int n = 0; n < Traits::kRowTiles; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = n * 8 + lane % 4 * 2 + j;
      if (row >= work.rows) continue;
      const Target to = target_of(p, plan, sequence, work, packed_row(work, row));
      if (threadIdx.x < 4) to.stats() = state.stats[2 * n + j];
      float* o = to.o();
#pragma unroll
      for (int slice = 0; slice < Traits::kSlices; ++slice)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int d = (warp + slice * Traits::kWarps) * 16 + half * 8 + lane / 4;
          if (d < p.dim) o[d] = state.o[slice * Traits::kRowTiles + n][half * 2 + j];
        }
    }
}

// ---- the kernel -----------------------------------------------------------------------------

template <class Traits>
__global__ __launch_bounds__(Traits::kThreads,
                             2) void attend_decode_kernel(const __grid_constant__ AttendParams p,
                                                          const __grid_constant__ Plan plan) {
  using T = typename Traits::Element;
  extern __shared__ __align__(128) std::byte memory[];
  const DecodeShared<Traits> shared(memory);
  const std::uint32_t weights = arch::shared_address(shared.weights);

  for (int index = blockIdx.x; index < plan.works; index = next_work(plan, index, shared.index)) {
    const Work work = work_of(p, plan, index);
    if (work.rows == 0) continue;
    const Sequence sequence = sequence_of(p, work.sequence);
    __syncthreads();  // the last piece of work is done with shared memory
    load_queries<T, Traits::kDim, Traits::kRows, Traits::kThreads, Traits::kLoader>(
        shared.queries, p, sequence, work);
    if (threadIdx.x < Traits::kRows) {
      const int row = min(static_cast<int>(threadIdx.x), work.rows - 1);
      const PackedRow at = packed_row(work, row);
      shared.views[threadIdx.x] = row_view(p, sequence, at.token, work.split);
      if constexpr (!Traits::kPlain)
        if (p.bias) shared.rows[threadIdx.x] = at;
    }
    if constexpr (!Traits::kPlain)  // once: a read from memory would wait behind the keys
      if (threadIdx.x == 0) {
        shared.scales[0] = p.scale(work.kv_head);
        shared.scales[1] = p.v_scale[work.kv_head];
      }
    __syncthreads();
    const View view =
        tile_view(p, sequence, work.split, shared.views[0], shared.views[Traits::kRows - 1]);
    const TreeCut cut = tree_cut(p, plan, work);
    SegmentWalk walk(p.shard.of(work.sequence).order(sequence.kv_len), view.any, cut.split,
                     cut.splits);
    SegmentQueue<Traits::kQueue> queue(walk);
    int stage = 0;  // of the chunk in work
    int turn = 0;   // of the segment in work: the slot of its places
    const auto places_of = [&](int entry) {
      const int at = turn + entry;
      return shared.places + (at < Traits::kPlaceSlots ? at : at - Traits::kPlaceSlots) * kSegment;
    };
    const bool placed_k = looks_ahead<Traits>(p, p.k), placed_v = looks_ahead<Traits>(p, p.v);
    const T *base_k = nullptr, *base_v = nullptr;
    if constexpr (Traits::kPaged) {
      if (placed_k || placed_v) {
        base_k = place_base<Traits>(p.k, work.kv_head);
        base_v = place_base<Traits>(p.v, work.kv_head);
        KeyPlace places[Traits::kPlaceLead];
#pragma unroll
        for (int i = 0; i < Traits::kPlaceLead; ++i)
          places[i] = find_place(p, sequence, view, queue.entry[i].segment);
#pragma unroll
        for (int i = 0; i < Traits::kPlaceLead; ++i) places_of(i)[threadIdx.x] = places[i];
        __syncthreads();
      }
    }
    /// Queues chunk `chunk` (counted from the first of the segment in work) into the stage that it
    /// takes in turn. The group is committed even when it is empty: waiting counts groups.
    const auto load = [&](int chunk) {
      const std::int64_t segment = queue.segment(chunk / Traits::kChunks);
      if (segment >= 0) {
        const int kind = chunk % Traits::kChunks;
        int to = stage + Traits::kAhead;
        if (to >= Traits::kStages) to -= Traits::kStages;
        const std::uint32_t tile = shared.ring + to * Traits::kChunkBytes;
        const KvRows& source = kind < 2 ? p.k : p.v;
        bool placed = false;
        if constexpr (Traits::kPaged) {
          placed = kind < 2 ? placed_k : placed_v;
          if (placed)
            load_places<Traits>(tile, source, p.dim, kind < 2 ? base_k : base_v,
                                places_of(chunk / Traits::kChunks) + kind % 2 * Traits::kKeys);
        }
        if (!placed)
          load_chunk<Traits>(tile, source, p, work.kv_head, sequence, view,
                             segment * kSegment + kind % 2 * Traits::kKeys);
      }
      arch::commit_copies();
    };
    /// The chunk in work is there; the stage before it is free and takes the next chunk.
    const auto advance = [&](int chunk) {
      arch::wait_copies<Traits::kAhead - 1>();
      __syncthreads();
      if constexpr (Traits::kPaged) {  // into the slot of the segment before, which is loaded
        if (chunk == 0 && (placed_k || placed_v))
          queue_place(places_of(Traits::kPlaceLead) + threadIdx.x, p, sequence, view,
                      queue.entry[Traits::kPlaceLead].segment);
      }
      load(chunk + Traits::kAhead);
      const std::uint32_t ready = shared.ring + stage * Traits::kChunkBytes;
      if (++stage == Traits::kStages) stage = 0;
      return ready;
    };
    stage = 1;
#pragma unroll 1
    for (int chunk = 0; chunk < Traits::kAhead; ++chunk) {
      load(chunk);  // into stages 0, 1, ...: stage + kAhead wraps to stage - 1
      if (++stage == Traits::kStages) stage = 0;
    }
    stage = 0;

    typename Traits::State state;
    state.clear();
    typename Traits::Stack stack(nullptr, 0, plan.stack, plan.depth);
    while (queue.entry[0].segment >= 0) {
      const std::int64_t first = queue.entry[0].segment * kSegment;
      float s[2][Traits::kRowTiles][4] = {};
#pragma unroll
      for (int chunk = 0; chunk < 2; ++chunk)
        multiply_chunk_keys<Traits>(s[chunk], advance(chunk), shared.queries);
      score_segment<Traits>(s, p, shared, view, sequence, first);
      state.clear();
      weigh_segment<Traits>(s, shared, state.stats);
#pragma unroll
      for (int chunk = 0; chunk < 2; ++chunk)
        multiply_chunk_values<Traits>(state, advance(2 + chunk), weights, chunk);
      if constexpr (!Traits::kPlain)
        if (p.v_scale) scale_state(state, shared.scales[1]);
      if (queue.entry[1].segment >= 0)
        stack.fold(state, finished_level(queue.entry[0].place, queue.entry[1].place));
      queue.step(walk);
      if constexpr (Traits::kPaged) turn = turn < Traits::kPlaceLead ? turn + 1 : 0;
    }
    stack.fold(state, stack.kAll);
    arch::wait_copies<0>();
    store_columns<Traits>(p, plan, sequence, work, state);
  }
}

template <class T, int kDim, int kRows, Loader kLoader>
KernelShape decode_shape() {
  using Traits = DecodeTraits<T, kDim, kRows, kLoader>;
  return {reinterpret_cast<const void*>(&attend_decode_kernel<Traits>), Traits::kThreads,
          Traits::kSharedBytes, kRows, Traits::Stack::kStateBytes};
}

/// The instance for sequences of about `rows` packed rows.
template <class T, Loader kLoader>
KernelShape decode_for(int dim, std::int64_t rows) {
  const auto shape = [&](auto size) {
    constexpr int kDim = decltype(size)::value;
    constexpr int kMany = kDim <= 128 ? 32 : 16;  // as many as registers allow
    return rows <= 8 ? decode_shape<T, kDim, 8, kLoader>()
                     : decode_shape<T, kDim, kMany, kLoader>();
  };
  if constexpr (kLoader == Loader::plain)
    return for_dim(dim, shape);
  else
    return for_general_dim(dim, shape);
}

}  // namespace longspan::kernels::cuda::block
