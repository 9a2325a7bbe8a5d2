// Attention of short queries, where reading the keys is the work. Keys are the long side of every
// product, so that a group's few rows waste nothing:
//
//     S^T = K Q^T     16 keys x 8 rows at a time, a segment of 128 keys in registers
//     O^T += V^T P^T  P^T is S^T's fragment transposed in registers
//
// A warp does all of this for its own rows and meets nobody: no barrier stands between a key and
// its value, and the warps of a multiprocessor hide each other's latencies. Up to eight rows are
// one warp's; more rows are a team's, whose warps share the keys.
//
// A segment's state is small; segments fold in the fixed order, always. A team takes an aligned
// part of the order's tree (a split), so the number of splits fills the GPU and never changes a
// bit. decode_stream.cuh loads, decode_operands.cuh multiplies, decode_pages.cuh finds pages,
// decode_order.cuh says which sequence comes next.
#pragma once

#include "kernels/cuda/arch/overlap.cuh"
#include "kernels/cuda/attend.hpp"
#include "kernels/cuda/bias.cuh"
#include "kernels/cuda/decode_operands.cuh"
#include "kernels/cuda/decode_passage.cuh"
#include "kernels/cuda/decode_stack.cuh"
#include "kernels/cuda/decode_stream.cuh"
#include "kernels/cuda/fold_stack.cuh"
#include "kernels/cuda/instances/dims.hpp"
#include "kernels/cuda/loader.cuh"
#include "kernels/cuda/view.cuh"

namespace longspan::kernels::cuda {

// ---- traits ---------------------------------------------------------------------------------

/// `Stored`: of keys and values, as they lie in shared memory. fp8 becomes fp16 where a fragment is
/// loaded: both of its kinds are subsets of fp16.
template <class Stored, int kHeadDim, int kTeamWarps, int kRowTileCount, Loader kKeyLoader>
struct DecodeTraits {
  static constexpr bool kFp8 = kKeyLoader == Loader::any8;
  static_assert(kFp8 == (sizeof(Stored) == 1));
  static constexpr bool kE5M2 = std::is_same_v<Stored, __nv_fp8_e5m2>;
  static constexpr bool kPlain = kKeyLoader == Loader::plain;  // no pages, no scales, no bias
  using Element = std::conditional_t<kFp8, __half, Stored>;    // of the products
  static constexpr int kDim = kHeadDim;

  static constexpr int kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kTeam = kTeamWarps;  // warps that share keys: 1, 2 or 4
  static constexpr int kTeamThreads = 32 * kTeam;
  static constexpr int kTeams = kWarps / kTeam;
  static constexpr int kRowTiles = kRowTileCount;  // of a warp, eight packed rows each
  static constexpr int kWarpRows = 8 * kRowTiles;
  static constexpr int kRows = kWarpRows * kTeam;

  static constexpr int kTile = kBoxKeys;           // keys of a product
  static constexpr int kTiles = kSegment / kTile;  // of a segment
  static constexpr int kRowBytes = kDim * static_cast<int>(sizeof(Stored));
  static constexpr int kWarpTiles =  // of a stage that a warp asks for
      kTeam == 1 && kRowBytes <= 128 ? 2 : 1;
  static constexpr int kStageTiles = kWarpTiles * kTeam;
  static constexpr int kTileBytes = kTile * kRowBytes;
  static constexpr int kStageKeys = kTile * kStageTiles;
  static constexpr int kKeyStages = kSegment / kStageKeys;
  static constexpr int kSegmentStages = 2 * kKeyStages;  // keys, then values
  static constexpr int kStageBytes = kStageKeys * kRowBytes;
  using Layout = Tile<__half, kRowBytes / 2, kTile>;  // of each tile of a stage, in 16-bit columns
  // Two blocks share a multiprocessor. 48 KB a block are enough under way, 64 where the warps of a
  // team wait for each other, and no more than one segment; what is left holds states that wait
  // (kNearLevels).
  static constexpr int kFits = (kTeam == 1 ? 48 : 64) * 1024 / kTeams / kStageBytes;
  static constexpr bool kThreeFit = 3 * kTeams * kStageBytes <= 88 * 1024;
  static constexpr int kStages = kFits < 3                    ? (kThreeFit ? 3 : 2)
                                 : kFits > kSegmentStages + 1 ? kSegmentStages + 1
                                                              : kFits;

  // Lanes that load a row, 16 bytes each: a power of two, of which some may have nothing to do.
  static constexpr int kLanes = kRowBytes <= 64    ? 4
                                : kRowBytes <= 128 ? 8
                                : kRowBytes <= 256 ? 16
                                                   : 32;
  static constexpr int kStepRows = kTeamThreads / kLanes;

  static constexpr int kSlices = kDim / 16;  // of dim, a product each
  static_assert(kDim % 16 == 0 && kStageKeys % kStepRows == 0);

  struct RowOf {  // quad = slice * kRowTiles + row tile; rows 2t, 2t + 1 of each row tile
    __device__ static constexpr int row(int quad, int i) { return quad % kRowTiles * 2 + i % 2; }
  };
  using State = ThreadState<2 * kRowTiles, kSlices * kRowTiles, RowOf>;
  // Levels in registers. A register too many is read from memory behind all keys that are under
  // way.
  static constexpr int kLow = kSlices * kRowTiles > 8 ? 0 : kPlain ? 2 : 1;
  using Stack = DecodeStack<State, kThreads, kLow>;
  static constexpr int kNearLevels = 2;  // with them splits of 16 segments need no memory

  using Shared = TeamShared<DecodeTraits>;
  static constexpr int kSharedBytes =
      kTeams * (kStages * kStageBytes + static_cast<int>(sizeof(Shared)));
};

// ---- steps ----------------------------------------------------------------------------------

/// ALiBi and qq_bias. Not inlined, as it is rare and large.
template <class Traits>
__device__ __noinline__ void add_biases(Scores<Traits>& scores, const AttendParams& p,
                                        const DecodePiece& piece, const PackedRow* rows,
                                        std::int64_t first) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int tile = 0; tile < Traits::kTiles; ++tile)
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const std::int64_t key = first + tile * Traits::kTile + half * 8 + lane / 4;
      const int column = key_column(p, piece.sequence, piece.view, key);
#pragma unroll 1
      for (int i = 0; i < 2 * Traits::kRowTiles; ++i) {
        const RowBias bias(p.bias, rows[i / 2 * 8 + lane % 4 * 2 + i % 2]);
        float& x = scores.s[tile][i / 2][half * 2 + i % 2];
        x = RowBias::add(x, bias.alibi(column) + bias.qq(column));
      }
    }
}

/// Products -> scores in base 2; -inf where the row does not see the key. `first_row`: of the warp.
template <class Traits>
__device__ __forceinline__ void score_segment(Scores<Traits>& scores, const AttendParams& p,
                                              const typename Traits::Shared& shared,
                                              const DecodeSegment& segment,
                                              const DecodeQueries<Traits>& queries, int first_row) {
  const int lane = threadIdx.x % 32;
  const DecodePiece& piece = shared.piece[segment.piece];
  const View view = piece.view;
  const std::int64_t first = segment.index * kSegment;
  const auto row_of = [&](int n, int j) { return first_row + n * 8 + lane % 4 * 2 + j; };
  const auto key_of = [&](int tile, int half) {
    return first + tile * Traits::kTile + half * 8 + lane / 4;
  };
  Score score = p.score;
  if constexpr (!Traits::kPlain) score.scale = piece.score_scale;
  auto& s = scores.s;
  const auto all = [&](const auto& of) {
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile)
#pragma unroll
      for (int n = 0; n < Traits::kRowTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& x = s[tile][n][i];
          if constexpr (Traits::kFp8)
            x = of(x, queries.undo[n][i % 2]);
          else
            x = of(x, 1.0f);
        }
  };
  if (score.softcap == 0.0f) {  // once, not for each
    const float scale = score.scale * kLog2E;
    all([&](float product, float undo) { return product * (scale * undo); });
  } else {
    all([&](float product, float undo) { return score(product * undo); });
  }
  if (!view.full(first, kSegment)) {
#pragma unroll
    for (int n = 0; n < Traits::kRowTiles; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const Interval row = shared.views[segment.piece][row_of(n, j)];
#pragma unroll
        for (int tile = 0; tile < Traits::kTiles; ++tile)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            if (!sees(view, row, key_of(tile, half))) s[tile][n][half * 2 + j] = -infinity();
      }
  }
  if constexpr (!Traits::kPlain) {
    if (!p.bias) return;
    Scores<Traits> biased = scores;  // the original stays in registers
    add_biases(biased, p, piece, shared.rows[segment.piece] + first_row, first);
    scores = biased;
  }
}

/// Scores -> P^T as the products' second factor, and the segment's maxima and sums: over a lane's
/// keys of every fourth tile, then over the lanes, then over the four, in one order.
template <class Traits>
__device__ __forceinline__ void weigh_segment(Scores<Traits>& scores, Passage<Traits>& passage,
                                              Stats (&stats)[2 * Traits::kRowTiles]) {
  auto& s = scores.s;
#pragma unroll
  for (int n = 0; n < Traits::kRowTiles; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float top = -infinity();
#pragma unroll
      for (int tile = 0; tile < Traits::kTiles; ++tile)
        top = fmaxf(top, fmaxf(s[tile][n][j], s[tile][n][2 + j]));
#pragma unroll
      for (int step = 4; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
      const float from = top == -infinity() ? 0.0f : top;  // nothing visible: P = 0
      // Four sums, so that additions need not wait for each other.
      constexpr int kApart = 4;
      float sum[kApart] = {};
#pragma unroll
      for (int tile = 0; tile < Traits::kTiles; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& x = s[tile][n][half * 2 + j];
          x = arch::exp2_fast(__fadd_rn(x, -from));
          sum[tile % kApart] = __fadd_rn(sum[tile % kApart], x);
        }
#pragma unroll
      for (float& part : sum)
#pragma unroll
        for (int step = 4; step < 32; step *= 2)
          part = __fadd_rn(part, __shfl_xor_sync(~0u, part, step));
      const float whole = __fadd_rn(__fadd_rn(sum[0], sum[1]), __fadd_rn(sum[2], sum[3]));
      stats[2 * n + j] = {top, whole};
    }
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
      const auto weights = [&](int half) {
        return arch::transpose_matrix(
            arch::pack<typename Traits::Element>(s[tile][n][half * 2], s[tile][n][half * 2 + 1]));
      };
      passage.put_weights(tile, n, weights(0), weights(1));
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

/// The warp's rows of a finished piece.
template <class Traits>
__device__ __forceinline__ void store_rows(const AttendParams& p, const Plan& plan,
                                           const DecodePiece& piece, int first_row,
                                           const typename Traits::State& state) {
  const int lane = threadIdx.x % 32;
  const Work work = piece.work;
#pragma unroll
  for (int n = 0; n < Traits::kRowTiles; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = first_row + n * 8 + lane % 4 * 2 + j;
      if (row >= work.rows) continue;
      const Target to = target_of(p, plan, piece.sequence, work, packed_row(work, row));
      if (lane < 4) to.stats() = state.stats[2 * n + j];
      float* o = to.o();
#pragma unroll
      for (int slice = 0; slice < Traits::kSlices; ++slice)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int d = slice * 16 + result_column<Traits>(half);
          if (d < p.dim) o[d] = state.o[slice * Traits::kRowTiles + n][half * 2 + j];
        }
    }
}

// ---- the kernel -----------------------------------------------------------------------------

template <class Traits>
__global__ __launch_bounds__(Traits::kThreads,
                             2) void attend_decode_kernel(const __grid_constant__ AttendParams p,
                                                          const __grid_constant__ Plan plan,
                                                          const __grid_constant__ KeyBoxes boxes) {
  extern __shared__ __align__(1024) std::byte memory[];
  constexpr int kRing = Traits::kStages * Traits::kStageBytes;
  const int team = static_cast<int>(threadIdx.x) / Traits::kTeamThreads;
  const int first_row = static_cast<int>(threadIdx.x) / 32 % Traits::kTeam * Traits::kWarpRows;
  auto& shared = reinterpret_cast<typename Traits::Shared*>(memory + Traits::kTeams * kRing)[team];

  using Offsets = DecodeOffsets<Traits>;
  const Offsets key_offset = Offsets::keys_first();
  const Offsets value_offset = Traits::kFp8 ? Offsets::keys_first() : Offsets::columns_first();

  arch::wait_for_kernels_before();
  DecodeStream<Traits> stream(p, plan, boxes, shared, arch::shared_address(memory) + team * kRing);
  constexpr int kStack = Traits::kSharedBytes;  // behind it, what the launch adds
  const int near_levels =
      (arch::dynamic_shared_bytes() - kStack) / static_cast<int>(Traits::Stack::kStateBytes);
  typename Traits::Stack stack(memory + kStack, near_levels, plan.stack, plan.depth);
  DecodeQueries<Traits> queries;
  Passage<Traits> passage(shared);
  const auto load_queries = [&](const DecodeSegment& of) {
    queries.load(p, shared.piece[of.piece].sequence, shared.piece[of.piece].work, first_row);
  };
  bool first = true;
  while (stream.begin()) {
    const DecodeSegment segment = stream.segment();
    if (first) load_queries(segment);
    first = false;
    // Loops over stages are not unrolled: code that has to be fetched costs more than what passes
    // through shared memory in its place.
#pragma unroll 1
    for (int stage = 0; stage < Traits::kKeyStages; ++stage) {
      const std::uint32_t keys = stream.template advance<0, Traits::kKeyStages>(stage);
#pragma unroll
      for (int tile = 0; tile < Traits::kStageTiles; ++tile) {
        float s[Traits::kRowTiles][4];
        multiply_keys<Traits>(s, keys + tile * Traits::kTileBytes, key_offset, queries);
        passage.put_scores(stage * Traits::kStageTiles + tile, s);
      }
    }
    Scores<Traits> scores;
    passage.get_scores(scores);
    score_segment<Traits>(scores, p, shared, segment, queries, first_row);
    typename Traits::State state;
    state.clear();
    weigh_segment<Traits>(scores, passage, state.stats);
    // Queries of another piece come while values are multiplied: a read waits behind all keys.
    const DecodeSegment& upcoming = stream.next_segment();
    if (upcoming && upcoming.piece != segment.piece) load_queries(upcoming);
    stream.pass_middle();
#pragma unroll 1
    for (int stage = 0; stage < Traits::kKeyStages; ++stage) {
      const std::uint32_t values =
          stream.template advance<Traits::kKeyStages, Traits::kSegmentStages>(Traits::kKeyStages +
                                                                              stage);
#pragma unroll
      for (int tile = 0; tile < Traits::kStageTiles; ++tile) {
        std::uint32_t weights[Traits::kRowTiles][2];
        passage.get_weights(stage * Traits::kStageTiles + tile, weights);
        multiply_values<Traits>(state, values + tile * Traits::kTileBytes, value_offset, weights);
      }
    }
    if constexpr (!Traits::kPlain)
      if (p.v_scale) scale_state(state, shared.piece[segment.piece].value_scale);
    const DecodeSegment& next = stream.segment();
    const bool last = !next || next.piece != segment.piece;
    stack.fold(state, last ? stack.kAll : finished_level(segment.place, next.place));
    if (last) store_rows<Traits>(p, plan, shared.piece[segment.piece], first_row, state);
  }
}

template <class Stored, int kDim, int kTeam, int kRowTiles, Loader kLoader>
KernelShape decode_shape() {
  using Traits = DecodeTraits<Stored, kDim, kTeam, kRowTiles, kLoader>;
  return {reinterpret_cast<const void*>(&attend_decode_kernel<Traits>),
          Traits::kThreads,
          Traits::kSharedBytes,
          Traits::kRows,
          Traits::Stack::kStateBytes,
          Traits::kTeams,
          Traits::kDim,
          Traits::kNearLevels,
          Traits::kWarpTiles * Traits::kTile};
}

/// The instance for sequences of about `rows` packed rows.
template <class Stored, Loader kLoader>
KernelShape decode_for(int dim, std::int64_t rows) {
  const auto shape = [&](auto size) {
    constexpr int kDim = decltype(size)::value;
    if (rows <= 8) return decode_shape<Stored, kDim, 1, 1, kLoader>();
    if constexpr (kDim <= 128)  // what larger ones would gain is not worth their code
      if (rows <= 16) return decode_shape<Stored, kDim, 2, 1, kLoader>();
    return decode_shape<Stored, kDim, 4, 1, kLoader>();
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
