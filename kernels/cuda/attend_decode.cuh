// Attention of short queries, where reading the keys is the work. Keys are the long side of every
// product, so that a group's few rows waste nothing:
//
//     S^T = K Q^T     16 keys x 8 rows at a time, a segment of 128 keys in registers
//     O^T += V^T P^T  P^T is S^T's fragment transposed in registers
//
// A warp does all of this for its own rows and meets nobody: no barrier stands between a key and
// its value, and the warps of a multiprocessor hide each other's latencies. Up to eight rows
// (sixteen where registers allow) are one warp's; more rows are a team's, whose warps share the
// keys.
//
// A segment's state is small; segments fold in the fixed order, always. A team takes an aligned
// part of the order's tree (a split), so the number of splits fills the GPU and never changes a
// bit. decode_stream.cuh loads, decode_pages.cuh finds pages.
#pragma once

#include "kernels/cuda/arch/overlap.cuh"
#include "kernels/cuda/attend.hpp"
#include "kernels/cuda/bias.cuh"
#include "kernels/cuda/decode_stack.cuh"
#include "kernels/cuda/decode_stream.cuh"
#include "kernels/cuda/fold_stack.cuh"
#include "kernels/cuda/instances/dims.hpp"
#include "kernels/cuda/loader.cuh"
#include "kernels/cuda/view.cuh"

namespace longspan::kernels::cuda {

// ---- traits ---------------------------------------------------------------------------------

template <class T, int kHeadDim, int kTeamWarps, int kRowTileCount, Loader kKeyLoader>
struct DecodeTraits {
  using Element = T;
  static constexpr Loader kLoader = kKeyLoader;
  static constexpr bool kPlain = kLoader == Loader::plain;  // no pages, no scales, no bias
  static constexpr bool kPaged = kLoader == Loader::any16;  // looks pages up ahead
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
  static constexpr int kStageTiles = kTeam;        // of a stage: one of each warp
  static constexpr int kTileBytes = kTile * kDim * 2;
  static constexpr int kStageKeys = kTile * kStageTiles;
  static constexpr int kKeyStages = kSegment / kStageKeys;
  static constexpr int kSegmentStages = 2 * kKeyStages;  // keys, then values
  static constexpr int kStageBytes = kStageKeys * kDim * 2;
  using Layout = Tile<T, kDim, kTile>;  // of each tile of a stage
  // Two blocks share a multiprocessor. 64 KB a block are enough under way, and no more than one
  // segment; more of them made every read slower.
  static constexpr int kFits = 64 * 1024 / kTeams / kStageBytes;
  static constexpr int kStages = kFits < 3                    ? 3
                                 : kFits > kSegmentStages + 1 ? kSegmentStages + 1
                                                              : kFits;

  // Lanes that load a row, 16 bytes each: a power of two, of which some may have nothing to do.
  static constexpr int kLanes = kDim <= 32 ? 4 : kDim <= 64 ? 8 : kDim <= 128 ? 16 : 32;
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

  using Shared = TeamShared<DecodeTraits>;
  static constexpr int kSharedBytes =
      kTeams * (kStages * kStageBytes + static_cast<int>(sizeof(Shared)));
};

// ---- steps ----------------------------------------------------------------------------------

/// The rows of a warp as the products' second factor: for each 16 columns two registers.
template <class Traits>
struct DecodeQueries {
  std::uint32_t word[Traits::kRowTiles][Traits::kSlices][2];

  __device__ void load(const AttendParams& p, const Sequence& sequence, const Work& work,
                       int first_row) {
    using T = typename Traits::Element;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < Traits::kRowTiles; ++n) {
      const int row = first_row + n * 8 + lane / 4;
      const bool valid = row < work.rows;
      const PackedRow at = packed_row(work, valid ? row : 0);
      const std::int64_t from = (sequence.first_row + at.token) * p.q.row_stride +
                                static_cast<std::int64_t>(at.head) * p.q.head_stride;
#pragma unroll
      for (int slice = 0; slice < Traits::kSlices; ++slice)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int d = slice * 16 + half * 8 + lane % 4 * 2;
          word[n][slice][half] =
              valid && d < p.dim ? load_query_pair<T, Traits::kLoader>(p, from + d) : 0u;
        }
    }
  }
};

/// Offsets of the 16-byte columns that a lane gives to ldmatrix. All of a tile's rows lie a
/// multiple of 16 rows into their stage, so the offsets inside a tile depend on the lane alone;
/// they repeat after kPeriod products, a panel.
template <class Traits>
struct DecodeOffsets {
  using Layout = typename Traits::Layout;
  static constexpr int kPeriod = Layout::kPeriod / 2;
  std::uint32_t column[kPeriod];

  __device__ DecodeOffsets(int row, int half) {
#pragma unroll
    for (int i = 0; i < kPeriod; ++i)
      column[i] = static_cast<std::uint32_t>(Layout::offset(row, 2 * i + half));
  }
  /// Of product `slice`.
  __device__ std::uint32_t operator()(int slice) const {
    return column[slice % kPeriod] + slice / kPeriod * Layout::kPanelBytes;
  }
};

/// s = K Q^T for 16 keys and the warp's rows.
template <class Traits>
__device__ __forceinline__ void multiply_keys(float (&s)[Traits::kRowTiles][4], std::uint32_t keys,
                                              const DecodeOffsets<Traits>& offset,
                                              const DecodeQueries<Traits>& queries) {
  using T = typename Traits::Element;
#pragma unroll
  for (int n = 0; n < Traits::kRowTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) s[n][i] = 0.0f;
#pragma unroll
  for (int slice = 0; slice < Traits::kSlices; ++slice) {
    std::uint32_t a[4];
    arch::load_matrices(a, keys + offset(slice));
#pragma unroll
    for (int n = 0; n < Traits::kRowTiles; ++n)
      arch::mma<T>(s[n], a, queries.word[n][slice][0], queries.word[n][slice][1]);
  }
}

/// O^T += V^T P^T for 16 keys.
template <class Traits>
__device__ __forceinline__ void multiply_values(
    typename Traits::State& state, std::uint32_t values, const DecodeOffsets<Traits>& offset,
    const std::uint32_t (&weights)[Traits::kRowTiles][2]) {
  using T = typename Traits::Element;
#pragma unroll
  for (int slice = 0; slice < Traits::kSlices; ++slice) {
    std::uint32_t a[4];
    arch::load_matrices_transposed(a, values + offset(slice));
#pragma unroll
    for (int n = 0; n < Traits::kRowTiles; ++n)
      arch::mma<T>(state.o[slice * Traits::kRowTiles + n], a, weights[n][0], weights[n][1]);
  }
}

/// Products -> scores in base 2; -inf where the row does not see the key. `first_row`: of the warp.
template <class Traits>
__device__ __forceinline__ void score_segment(float (&s)[Traits::kTiles][Traits::kRowTiles][4],
                                              const AttendParams& p,
                                              const typename Traits::Shared& shared,
                                              const DecodeSegment& segment, int first_row) {
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
  const auto all = [&](const auto& of) {
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile)
#pragma unroll
      for (int n = 0; n < Traits::kRowTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[tile][n][i] = of(s[tile][n][i]);
  };
  if (score.softcap == 0.0f) {  // once, not for each
    const float scale = score.scale * kLog2E;
    all([&](float product) { return product * scale; });
  } else {
    all(score);
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
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int column = key_column(p, piece.sequence, view, key_of(tile, half));
#pragma unroll
        for (int n = 0; n < Traits::kRowTiles; ++n)
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const RowBias bias(p.bias, shared.rows[segment.piece][row_of(n, j)]);
            float& x = s[tile][n][half * 2 + j];
            x = RowBias::add(x, bias.alibi(column) + bias.qq(column));
          }
      }
  }
}

/// Scores -> P^T as the products' second factor, and the segment's maxima and sums: over a lane's
/// keys of every fourth tile, then over the lanes, then over the four, in one order.
template <class Traits>
__device__ __forceinline__ void weigh_segment(
    float (&s)[Traits::kTiles][Traits::kRowTiles][4],
    std::uint32_t (&weights)[Traits::kTiles][Traits::kRowTiles][2],
    Stats (&stats)[2 * Traits::kRowTiles]) {
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
      // In the order of attend_decode_block.cuh, whose four warps have every fourth tile each:
      // pages have the bits of contiguous rows.
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
    for (int tile = 0; tile < Traits::kTiles; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        weights[tile][n][half] = arch::transpose_matrix(
            arch::pack<typename Traits::Element>(s[tile][n][half * 2], s[tile][n][half * 2 + 1]));
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
      float* o = to.o() + lane / 4;
#pragma unroll
      for (int slice = 0; slice < Traits::kSlices; ++slice)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int d = slice * 16 + half * 8;
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

  const int lane = threadIdx.x % 32;
  const DecodeOffsets<Traits> key_offset(lane % 16, lane / 16);
  const DecodeOffsets<Traits> value_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);

  arch::wait_for_kernels_before();
  DecodeStream<Traits> stream(p, plan, boxes, shared, arch::shared_address(memory) + team * kRing);
  typename Traits::Stack stack(plan.stack, plan.depth);
  DecodeQueries<Traits> queries;
  int piece = -1;  // whose queries these are
  while (stream.segment()) {
    const DecodeSegment segment = stream.segment();
    if (segment.piece != piece) {
      piece = segment.piece;
      queries.load(p, shared.piece[piece].sequence, shared.piece[piece].work, first_row);
    }
    float s[Traits::kTiles][Traits::kRowTiles][4];
#pragma unroll
    for (int stage = 0; stage < Traits::kKeyStages; ++stage) {
      const std::uint32_t keys = stream.advance(stage);
#pragma unroll
      for (int tile = 0; tile < Traits::kStageTiles; ++tile)
        multiply_keys<Traits>(s[stage * Traits::kStageTiles + tile],
                              keys + tile * Traits::kTileBytes, key_offset, queries);
    }
    score_segment<Traits>(s, p, shared, segment, first_row);
    std::uint32_t weights[Traits::kTiles][Traits::kRowTiles][2];
    typename Traits::State state;
    state.clear();
    weigh_segment<Traits>(s, weights, state.stats);
#pragma unroll
    for (int stage = 0; stage < Traits::kKeyStages; ++stage) {
      const std::uint32_t values = stream.advance(Traits::kKeyStages + stage);
#pragma unroll
      for (int tile = 0; tile < Traits::kStageTiles; ++tile)
        multiply_values<Traits>(state, values + tile * Traits::kTileBytes, value_offset,
                                weights[stage * Traits::kStageTiles + tile]);
    }
    if constexpr (!Traits::kPlain)
      if (p.v_scale) scale_state(state, shared.piece[segment.piece].value_scale);
    const DecodeSegment& next = stream.segment();
    const bool last = !next || next.piece != segment.piece;
    stack.fold(state, last ? stack.kAll : finished_level(segment.place, next.place));
    if (last) store_rows<Traits>(p, plan, shared.piece[segment.piece], first_row, state);
  }
}

template <class T, int kDim, int kTeam, int kRowTiles, Loader kLoader>
KernelShape decode_shape() {
  using Traits = DecodeTraits<T, kDim, kTeam, kRowTiles, kLoader>;
  return {reinterpret_cast<const void*>(&attend_decode_kernel<Traits>),
          Traits::kThreads,
          Traits::kSharedBytes,
          Traits::kRows,
          Traits::Stack::kStateBytes,
          Traits::kTeams,
          Traits::kDim};
}

/// The instance for sequences of about `rows` packed rows.
template <class T, Loader kLoader>
KernelShape decode_for(int dim, std::int64_t rows) {
  const auto shape = [&](auto size) {
    constexpr int kDim = decltype(size)::value;
    if (rows <= 8) return decode_shape<T, kDim, 1, 1, kLoader>();
    return decode_shape<T, kDim, 4, 1, kLoader>();
  };
  if constexpr (kLoader == Loader::plain)
    return for_dim(dim, shape);
  else
    return for_general_dim(dim, shape);
}

// The instances that are not plain, one file each.
KernelShape decode_bf16_any16(int dim, std::int64_t rows);
KernelShape decode_bf16_any8(int dim, std::int64_t rows);
KernelShape decode_fp16_any16(int dim, std::int64_t rows);
KernelShape decode_fp16_any8(int dim, std::int64_t rows);

}  // namespace longspan::kernels::cuda
