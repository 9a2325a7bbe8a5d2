// Attention of short queries, which is bound by reading the keys. Keys are the long side of every
// product, so that a group's few rows waste nothing:
//
//     S^T = K Q^T     16 keys x 8 rows at a time, a segment of 128 keys in registers
//     O^T += V^T P^T  P^T is S^T's fragment transposed in registers
//
// A block has a scheduler warp, producer warps that load, and four consumer warps that multiply.
// The consumers share a segment: each takes a quarter of its keys for all rows, passes its maxima
// and its weights to the others, and then takes a quarter of the values' columns. A segment is thus
// a short chain of work, and all rows of a group, and several new tokens, need one read.
//
// A segment's state is small, and segments always fold in the fixed order. A block takes an aligned
// part of the order's tree (a split), so the number of splits can fill the GPU without changing a
// bit. The scheduler is in decode_scheduler.cuh, its order of work tiles in decode_order.cuh, the
// producer in decode_producer.cuh, and the consumers' operands in decode_operands.cuh.
// decode_shared.cuh has the shared memory of a block, decode_parts.cuh the exchange between
// consumers.
#pragma once

#include "kernels/cuda/arch/overlap.cuh"
#include "kernels/cuda/arch/shared.cuh"
#include "kernels/cuda/common/bias.cuh"
#include "kernels/cuda/common/dims.hpp"
#include "kernels/cuda/common/fold_stack.cuh"
#include "kernels/cuda/common/loader.cuh"
#include "kernels/cuda/common/view.cuh"
#include "kernels/cuda/decode/decode_operands.cuh"
#include "kernels/cuda/decode/decode_parts.cuh"
#include "kernels/cuda/decode/decode_producer.cuh"
#include "kernels/cuda/decode/decode_scheduler.cuh"
#include "kernels/cuda/decode/decode_shared.cuh"
#include "kernels/cuda/decode/decode_stack.cuh"
#include "kernels/cuda/dispatch/attend.hpp"

namespace longspan::kernels::cuda {

// ---- traits ---------------------------------------------------------------------------------

/// `Stored` is the type of keys and values in shared memory. fp8 becomes fp16 when a fragment is
/// loaded: both of its types are subsets of fp16.
template <class Stored, int kHeadDim, int kRowTileCount, Loader kKeyLoader>
struct DecodeTraits {
  static constexpr bool kFp8 = kKeyLoader == Loader::any8;
  static_assert(kFp8 == (sizeof(Stored) == 1));
  static constexpr bool kE5M2 = std::is_same_v<Stored, __nv_fp8_e5m2>;
  static constexpr bool kPlain = kKeyLoader == Loader::plain;  // no pages, no scales, no bias
  static constexpr bool kBiases = !kPlain;
  static constexpr bool kLatent = false;  // values are not in the keys (MlaInOrderTraits)
  using Element = std::conditional_t<kFp8, __half, Stored>;  // of the products
  static constexpr int kDim = kHeadDim;

  static constexpr int kWarps = 4;  // consumers
  static constexpr int kThreads = 32 * kWarps;
  // Producer threads: more than TMA needs if keys may be loaded one by one.
  static constexpr int kLoaders = kPlain || kRowTileCount > 2 ? 32 : kFp8 ? 64 : 128;
  static constexpr int kBlockThreads = kThreads + kLoaders + 32;  // and the scheduler warp
  static constexpr int kRowTiles = kRowTileCount;                 // eight packed rows each
  static constexpr int kRows = 8 * kRowTiles;

  static constexpr int kTile = kBoxKeys;           // keys of a product
  static constexpr int kTiles = kSegment / kTile;  // of a segment: warps multiply them in turn
  static constexpr int kOwnTiles = kTiles / kWarps;
  static constexpr int kRowBytes = kDim * static_cast<int>(sizeof(Stored));
  static constexpr int kStageTiles = kRowBytes <= 128 ? 2 * kWarps : kWarps;
  static constexpr int kTileBytes = kTile * kRowBytes;
  static constexpr int kStageKeys = kTile * kStageTiles;
  static constexpr int kKeyStages = kSegment / kStageKeys;
  static constexpr int kSegmentStages = 2 * kKeyStages;  // keys, then values
  static constexpr int kStageBytes = kStageKeys * kRowBytes;
  using Layout =
      SwizzledTile<__half, kRowBytes / 2, kTile>;  // of each tile of a stage, in 16-bit columns
  // Two blocks share a multiprocessor. 64 KB in flight per block are enough; the remaining memory
  // holds waiting states (kNearLevels), which are large if there are many rows.
  static constexpr int kFits = (kRowTiles == 4 ? 48 : 64) * 1024 / kStageBytes;
  static constexpr bool kThreeFit = 3 * kStageBytes <= 80 * 1024;
  static constexpr int kStages = kFits < 3                    ? (kThreeFit ? 3 : 2)
                                 : kFits > 2 * kSegmentStages ? 2 * kSegmentStages
                                                              : kFits;

  // Lanes that load a row, 16 bytes each: a power of two, of which some may be idle.
  static constexpr int kLanes = kRowBytes <= 64    ? 4
                                : kRowBytes <= 128 ? 8
                                : kRowBytes <= 256 ? 16
                                                   : 32;
  static constexpr int kStepRows = kLoaders / kLanes;

  static constexpr int kSlices = kDim / 16;  // of dim, a product each
  static_assert(kDim % 16 == 0 && kStageKeys % kStepRows == 0);
  static constexpr int kLoads = kRowBytes / 32;  // fragments of a tile's values, which warps take
  static constexpr int kOwnLoads = (kLoads + kWarps - 1) / kWarps;  // in turn
  static constexpr int kLoadSlices = kSlices / kLoads;
  static constexpr int kOwnSlices = kOwnLoads * kLoadSlices;

  struct RowOf {  // quad = own slice * kRowTiles + row tile; rows 2t, 2t + 1 of each row tile
    __device__ static constexpr int row(int quad, int i) { return quad % kRowTiles * 2 + i % 2; }
  };
  using State = ThreadState<2 * kRowTiles, kOwnSlices * kRowTiles, RowOf>;
  // Levels of the stack in registers. A spilled register is read from memory behind all keys in
  // flight.
  static constexpr int kLow = State::kVectors <= 5 ? 2 : kRowTiles <= 2 ? 1 : 0;
  using Stack = DecodeStack<State, kThreads, kLow>;
  static constexpr int kNearLevels = 3;  // with eight rows, splits of 32 segments need no memory

  using Shared = DecodeShared<DecodeTraits>;
  static constexpr int kSharedBytes = kStages * kStageBytes + static_cast<int>(sizeof(Shared));
};

// ---- steps ----------------------------------------------------------------------------------

/// Adds ALiBi and qq_bias to the scores. It is not inlined, because it is rare and large.
template <class Traits>
__device__ __noinline__ void add_biases(Scores<Traits>& scores, const AttendParams& p,
                                        const DecodeWorkTile& piece, const QueryRow* rows,
                                        std::int64_t first) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int own = 0; own < Traits::kOwnTiles; ++own)
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const std::int64_t key = first + key_of_segment<Traits>(own, half);
      const int column = key_column(p, piece.sequence, piece.view, key);
#pragma unroll 1
      for (int i = 0; i < 2 * Traits::kRowTiles; ++i) {
        const RowBias bias(p.bias, rows[i / 2 * 8 + lane % 4 * 2 + i % 2]);
        float& x = scores.s[own][i / 2][half * 2 + i % 2];
        x = RowBias::add(x, bias.alibi(column) + bias.qq(column));
      }
    }
}

/// Turns products into scores in base 2. `undo`: DecodeQueries::undo.
template <class Traits>
__device__ __forceinline__ void scale_scores(Scores<Traits>& scores, float scale,
                                             const float* undo) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < Traits::kRowTiles; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float factor = Traits::kFp8 ? scale * undo[n * 8 + lane % 4 * 2 + j] : scale;
#pragma unroll
      for (int own = 0; own < Traits::kOwnTiles; ++own)
#pragma unroll
        for (int half = 0; half < 2; ++half) scores.s[own][n][half * 2 + j] *= factor;
    }
}

/// The same with a softcap. It is not inlined, because it is rare and large, and neither is the
/// masking of a segment: the instructions of the loop over segments are fetched all the time.
template <class Traits>
__device__ __noinline__ void cap_scores(Scores<Traits>& scores, Score score, const float* undo) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int own = 0; own < Traits::kOwnTiles; ++own)
#pragma unroll
    for (int n = 0; n < Traits::kRowTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = scores.s[own][n][i];
        x = score(Traits::kFp8 ? x * undo[n * 8 + lane % 4 * 2 + i % 2] : x);
      }
}

/// Sets scores of keys that a row does not see to -inf. `rows`: what each sees; `first`: key of the
/// segment.
template <class Traits>
__device__ __noinline__ void mask_scores(Scores<Traits>& scores, const View& view,
                                         const Interval* rows, std::int64_t first) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < Traits::kRowTiles; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const Interval row = rows[n * 8 + lane % 4 * 2 + j];
#pragma unroll
      for (int own = 0; own < Traits::kOwnTiles; ++own)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          if (!sees(view, row, first + key_of_segment<Traits>(own, half)))
            scores.s[own][n][half * 2 + j] = -infinity();
    }
}

/// Turns products into scores in base 2, -inf if the row does not see the key. `first`: key of the
/// segment; `slot`: of the work tile.
template <class Traits>
__device__ __forceinline__ void score_segment(Scores<Traits>& scores, const AttendParams& p,
                                              const typename Traits::Shared& shared, int slot,
                                              std::int64_t first) {
  const DecodeWorkTile& piece = shared.piece[slot];
  Score score = p.score;
  if constexpr (!Traits::kPlain) score.scale = piece.score_scale;
  // Functions change a copy, so that the original stays in registers.
  const auto apart = [&](const auto& change) {
    Scores<Traits> changed = scores;
    change(changed);
    scores = changed;
  };
  const float* undo = shared.queries[slot].undo;
  if (score.softcap == 0.0f)
    scale_scores<Traits>(scores, score.scale * kLog2E, undo);  // one factor for all of a row
  else
    apart([&](auto& all) { cap_scores<Traits>(all, score, undo); });
  if (!piece.view.full(first, kSegment))
    apart([&](auto& all) { mask_scores<Traits>(all, piece.view, shared.views[slot], first); });
  if constexpr (!Traits::kPlain)
    if (p.bias) apart([&](auto& all) { add_biases(all, p, piece, shared.rows[slot], first); });
}

/// Scores become P^T, the products' second factor for all warps, and stats the segment's maxima and
/// sums. They are reduced in one order: in each tile over a lane's keys and then over the lanes,
/// over a warp's tiles, over the warps.
template <class Traits>
__device__ __forceinline__ void weigh_segment(Scores<Traits>& scores, SegmentParts<Traits>& parts,
                                              Stats (&stats)[2 * Traits::kRowTiles]) {
  auto& s = scores.s;
  float own[Traits::kRowTiles][2], whole[Traits::kRowTiles][2];
#pragma unroll
  for (int n = 0; n < Traits::kRowTiles; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float top = -infinity();
#pragma unroll
      for (int tile = 0; tile < Traits::kOwnTiles; ++tile)
        top = fmaxf(top, fmaxf(s[tile][n][j], s[tile][n][2 + j]));
#pragma unroll
      for (int step = 4; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
      own[n][j] = top;
    }
  parts.put(parts.tops, own);
  parts.meet();
  parts.get(parts.tops, whole, [](float one, float other) { return fmaxf(one, other); });
#pragma unroll
  for (int n = 0; n < Traits::kRowTiles; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float top = whole[n][j];
      stats[2 * n + j].max = top;
      const float from = top == -infinity() ? 0.0f : top;  // nothing visible: P = 0
      float sums[Traits::kOwnTiles];
#pragma unroll
      for (int tile = 0; tile < Traits::kOwnTiles; ++tile) {
        float(&four)[4] = s[tile][n];
        four[j] = arch::exp2_fast(__fadd_rn(four[j], -from));
        four[2 + j] = arch::exp2_fast(__fadd_rn(four[2 + j], -from));
        sums[tile] = __fadd_rn(four[j], four[2 + j]);
#pragma unroll
        for (int step = 4; step < 32; step *= 2)
          sums[tile] = __fadd_rn(sums[tile], __shfl_xor_sync(~0u, sums[tile], step));
      }
      own[n][j] = Traits::kOwnTiles == 1 ? sums[0] : __fadd_rn(sums[0], sums[1]);
    }
#pragma unroll
    for (int tile = 0; tile < Traits::kOwnTiles; ++tile) {
      const auto weights = [&](int half) {
        return arch::transpose_matrix(
            arch::pack<typename Traits::Element>(s[tile][n][half * 2], s[tile][n][half * 2 + 1]));
      };
      parts.weights[own_tile<Traits>(tile)][n][threadIdx.x % 32] =
          make_uint2(weights(0), weights(1));
    }
  }
  parts.put(parts.sums, own);
  parts.meet();
  parts.get(parts.sums, whole, [](float one, float other) { return __fadd_rn(one, other); });
#pragma unroll
  for (int n = 0; n < Traits::kRowTiles; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) stats[2 * n + j].sum = whole[n][j];
}

/// The same as scale_values, with a scale that is already loaded.
template <class State>
__device__ inline void scale_state(State& state, float scale) {
#pragma unroll
  for (auto& quad : state.o)
#pragma unroll
    for (float& o : quad) o = __fmul_rn(o, scale);
}

/// The epilogue of a work tile: a warp stores its own columns of each row.
template <class Traits>
__device__ __forceinline__ void store_rows(const AttendParams& p, const WorkPlan& plan,
                                           const DecodeWorkTile& piece,
                                           const typename Traits::State& state) {
  const int lane = threadIdx.x % 32;
  const TileCoord work = piece.work;
#pragma unroll
  for (int n = 0; n < Traits::kRowTiles; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = n * 8 + lane % 4 * 2 + j;
      if (row >= work.rows) continue;
      const Target to = target_of(p, plan, piece.sequence, work, packed_row(work, row));
      if (threadIdx.x < 4) to.stats() = state.stats[2 * n + j];
      float* o = to.o();
#pragma unroll
      for (int own = 0; own < Traits::kOwnSlices; ++own)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int d = own_slice<Traits>(own) * 16 + result_column<Traits>(half);
          if (d < to.columns) o[d] = state.o[own * Traits::kRowTiles + n][half * 2 + j];
        }
    }
}

// ---- the kernel -----------------------------------------------------------------------------

/// The consumers' main loop takes segment after segment until none is left.
template <class Traits>
__device__ __forceinline__ void consume_segments(const AttendParams& p, const WorkPlan& plan,
                                                 typename Traits::Shared& shared,
                                                 std::uint32_t ring,
                                                 typename Traits::Stack& stack) {
  const KeyFragments<Traits> key_fragments;
  const ValueFragments<Traits> value_fragments;
  DecodeReader<Traits> reader(shared, ring);
  PipelineState<Traits::Shared::kPieces> pieces;  // the current work tile
  bool first = true;                              // segment of the work tile
  for (PipelineState<Traits::Shared::kSegments> known;; known.advance()) {
    std::uint32_t stage = reader.wait();
    const DecodeSegment segment = shared.segments[known.stage];
    if (!segment) break;
    const int piece = pieces.stage;
    if (first) shared.has_queries[piece].wait(pieces.parity);
    const int level = shared.levels[known.stage];
    Scores<Traits> scores;
    // Loops over stages are not unrolled: more instructions to fetch cost more.
#pragma unroll 1
    for (int i = 0; i < Traits::kKeyStages; ++i) {
      if (i > 0) stage = reader.wait();
#pragma unroll
      for (int own = 0; own < Traits::kStageTiles / Traits::kWarps; ++own) {
        float s[Traits::kRowTiles][4];
        multiply_keys<Traits>(s, stage + own_tile<Traits>(own) * Traits::kTileBytes, key_fragments,
                              shared.queries[piece]);
        scores.push(s);
      }
      reader.release();
    }
    score_segment<Traits>(scores, p, shared, piece, std::int64_t{segment.index} * kSegment);
    typename Traits::State state;
    state.clear();
    weigh_segment<Traits>(scores, shared.parts, state.stats);
#pragma unroll 1
    for (int i = 0; i < Traits::kKeyStages; ++i) {
      stage = reader.wait();
#pragma unroll
      for (int tile = 0; tile < Traits::kStageTiles; ++tile)
        multiply_values<Traits>(state, stage + tile * Traits::kTileBytes, value_fragments,
                                shared.parts.weights[i * Traits::kStageTiles + tile]);
      reader.release();
    }
    if constexpr (!Traits::kPlain)
      if (p.v_scale) scale_state(state, shared.piece[piece].value_scale);
    stack.fold(state, level);
    first = level == Traits::Stack::kAll;
    if (!first) continue;
    store_rows<Traits>(p, plan, shared.piece[piece], state);
    __syncwarp();
    if (threadIdx.x % 32 == 0) shared.done[piece].arrive();
    pieces.advance();
  }
}

template <class Traits>
__global__ __launch_bounds__(Traits::kBlockThreads, 2) void attend_decode_kernel(
    const __grid_constant__ AttendParams p, const __grid_constant__ WorkPlan plan,
    const __grid_constant__ KvTensorMaps maps) {
  std::byte* const memory = arch::shared_by_1024;
  const std::uint32_t ring = arch::shared_address(memory);
  constexpr int kRing = Traits::kStages * Traits::kStageBytes;
  auto& shared = *reinterpret_cast<typename Traits::Shared*>(memory + kRing);
  shared.init();
  __syncthreads();
  constexpr unsigned kScheduler = Traits::kThreads + Traits::kLoaders;
  if (threadIdx.x >= kScheduler) return DecodeScheduler<Traits>(p, plan, maps, shared).run();
  if (threadIdx.x >= Traits::kThreads) return DecodeProducer<Traits>(p, maps, shared, ring).run();
  arch::wait_for_kernels_before();
  constexpr int kStack = Traits::kSharedBytes;  // after it, the launch's extra memory
  const int near_levels =
      (arch::dynamic_shared_bytes() - kStack) / static_cast<int>(Traits::Stack::kStateBytes);
  typename Traits::Stack stack(memory + kStack, near_levels, plan.stack, plan.depth);
  consume_segments<Traits>(p, plan, shared, ring, stack);
}

template <class Stored, int kDim, int kRowTiles, Loader kLoader>
KernelShape decode_shape() {
  using Traits = DecodeTraits<Stored, kDim, kRowTiles, kLoader>;
  static_assert(Traits::kSharedBytes == bytes_of(Family::decode, kLoader, kDim, Traits::kRows));
  return {.decode = attend_decode_kernel<Traits>,
          .threads = Traits::kBlockThreads,
          .shared_bytes = Traits::kSharedBytes,
          .tile_rows = Traits::kRows,
          .state_bytes = Traits::Stack::kStateBytes,
          .box_dim = Traits::kDim,
          .near_levels = Traits::kNearLevels,
          .box_keys = Traits::kStageKeys};
}

/// Chooses the instance for sequences of about `rows` packed rows.
template <class Stored, Loader kLoader>
KernelShape decode_for(int dim, std::int64_t rows) {
  const auto shape = [&](auto size) {
    constexpr int kDim = decltype(size)::value;
    if (rows <= 8) return decode_shape<Stored, kDim, 1, kLoader>();
    if constexpr (kDim <= 128)  // larger ones would gain too little for their code size
      if (rows <= 16) return decode_shape<Stored, kDim, 2, kLoader>();
    return decode_shape<Stored, kDim, 4, kLoader>();
  };
  if constexpr (kLoader == Loader::plain)
    return for_dim(dim, shape);
  else
    return for_general_dim(dim, shape);
}

// The instances for pages, scales and biases, one file each.
KernelShape decode_bf16_any16(int dim, std::int64_t rows);
KernelShape decode_fp16_any16(int dim, std::int64_t rows);

}  // namespace longspan::kernels::cuda
