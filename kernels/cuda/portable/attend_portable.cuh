// Attention of long queries with mma.sync: FlashAttention-2's shape for every GPU from sm_80 on.
//
//     S = Q K^T,   m' = max(m, max S),   P = exp2(S - m'),   l = l 2^(m - m') + sum P,
//     O = O 2^(m - m') + P V
//
// A block holds 128 packed rows; K and V stream through shared memory in tiles of 64 keys. A warp
// owns 32 rows (16 where dim is large): each fragment of K and V that it reads serves two mma,
// without which shared memory would be the limit. With kInvariant each segment of 128 keys is
// folded from scratch and the segments in the fixed order. Where the row tiles alone do not fill
// the GPU, several blocks share the keys of one (Plan::splits).
#pragma once

#include "kernels/cuda/arch/shared.cuh"
#include "kernels/cuda/common/bias.cuh"
#include "kernels/cuda/common/fold_stack.cuh"
#include "kernels/cuda/common/loader.cuh"
#include "kernels/cuda/common/next_work.cuh"
#include "kernels/cuda/common/store_state.cuh"
#include "kernels/cuda/common/view.cuh"
#include "kernels/cuda/dispatch/attend.hpp"

namespace longspan::kernels::cuda {

// ---- traits ---------------------------------------------------------------------------------

/// kDimOfInstance: the larger of head_dim and value_dim fits it; missing columns are zeros.
template <class T, int kDimOfInstance>
struct PortableTraits {
  using Element = T;
  static constexpr int kDim = kDimOfInstance;
  static constexpr int kRows = 128;
  static constexpr int kWarps = kDim <= 128 ? 4 : 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRowTiles = kRows / 16 / kWarps;                 // m16 tiles of a warp
  static constexpr int kKeys = 64;                                      // in a tile of K or V
  static constexpr int kKeyTiles = kKeys / 8;                           // n8 tiles of S
  static constexpr int kDimTiles = kDim / 8;                            // n8 tiles of O
  static constexpr int kBlocks = kDim <= 64 ? 3 : kDim <= 128 ? 2 : 1;  // on a multiprocessor

  // Two: a tile is loaded while the one before it is in work. One, where two do not fit the 163 KB
  // of sm_80: V is loaded under Q K^T, and the next K under the softmax and P V.
  static constexpr int kStages = kDim <= 192 ? 2 : 1;

  static constexpr int kTileBytes = kKeys * kDim * 2;
  static constexpr int kQueryBytes = kRows * kDim * 2;
  static constexpr int kPieceBytes = 512;
  static constexpr int kColumnBytes = 2 * kKeys * 4;  // for biases, by the parity of the tile
  static constexpr int kSharedBytes = kQueryBytes + 2 * kStages * kTileBytes +
                                      kRows * static_cast<int>(sizeof(Interval)) + kPieceBytes;

  struct RowOf {  // quad = row tile * kDimTiles + dim tile
    __device__ static constexpr int row(int quad, int i) { return quad / kDimTiles * 2 + i / 2; }
  };
  using State = ThreadState<2 * kRowTiles, kRowTiles * kDimTiles, RowOf>;
};

// ---- steps ----------------------------------------------------------------------------------

/// The next tile of keys and the place of its segment in the fixed order's tree.
struct KeyTile {
  std::int64_t first;  // local key; < 0: no tile is left
  std::int64_t place;
};

/// What all threads of a block know of its piece of work. It stands in shared memory, since the
/// accumulators leave no registers for it; thread 0 walks the tiles, a barrier ahead of their use.
template <bool kInvariant>
struct Piece {
  Work work;
  Sequence sequence;
  View view;
  float scale;       // of its kv head's products
  int index;         // of the next piece of work
  KeyTile next[2];   // by the parity of the tile
  Interval keys;     // fast: its split of the local keys that are seen
  SegmentWalk walk;  // invariant: of thread 0

  /// Thread 0 only. A fast split is a run of whole tiles.
  template <int kKeys>
  __device__ void cut(const AttendParams& p, const TreeCut& cut) {
    if constexpr (kInvariant) {
      const SegmentOrder order = p.shard.for_sequence(sequence.index).order(sequence.kv_len);
      walk = SegmentWalk(order, view.any, cut.split, cut.splits);
    } else {
      keys = view.any;
      if (cut.splits == 1 || keys.empty()) return;
      const std::int64_t tile = keys.begin / kKeys;
      const std::int64_t tiles = (keys.end + kKeys - 1) / kKeys - tile;
      const Interval own{(tile + tiles * cut.split / cut.splits) * kKeys,
                         (tile + tiles * (cut.split + 1) / cut.splits) * kKeys};
      keys = intersection(keys, own);
    }
  }

  /// Thread 0 only. Tiles ascend, or follow the fixed order segment by segment.
  template <int kKeys>
  __device__ KeyTile first_tile() {
    if constexpr (kInvariant) {
      if (!walk.next()) return {-1, 0};
      return {walk.segment * kSegment, walk.place};
    } else {
      return {keys.empty() ? -1 : keys.begin / kKeys * kKeys, 0};
    }
  }
  template <int kKeys>
  __device__ KeyTile tile_after(KeyTile tile) {
    tile.first += kKeys;
    if constexpr (kInvariant) {
      if (tile.first % kSegment == 0) return first_tile<kKeys>();
    } else {
      if (tile.first >= keys.end) tile.first = -1;
    }
    return tile;
  }
};

/// S = Q K^T of the warp's rows.
template <class Traits>
__device__ inline void multiply_keys(float (&s)[Traits::kRowTiles][Traits::kKeyTiles][4],
                                     std::uint32_t queries, std::uint32_t keys) {
  using Layout = Tile<typename Traits::Element, Traits::kDim>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int m = 0; m < Traits::kRowTiles; ++m)
#pragma unroll
    for (int n = 0; n < Traits::kKeyTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[m][n][i] = 0.0f;

#pragma unroll
  for (int k = 0; k < Traits::kDim / 16; ++k) {
    std::uint32_t a[Traits::kRowTiles][4];
#pragma unroll
    for (int m = 0; m < Traits::kRowTiles; ++m)
      arch::load_matrices(a[m],
                          queries + Layout::offset((warp * Traits::kRowTiles + m) * 16 + lane % 16,
                                                   2 * k + lane / 16));
#pragma unroll
    for (int n = 0; n < Traits::kKeyTiles; n += 2) {
      std::uint32_t b[4];
      arch::load_matrices(
          b, keys + Layout::offset(n * 8 + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
#pragma unroll
      for (int m = 0; m < Traits::kRowTiles; ++m) {
        arch::mma<typename Traits::Element>(s[m][n], a[m], b[0], b[1]);
        arch::mma<typename Traits::Element>(s[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

/// Scores of keys that a row does not see become -inf.
template <class Traits>
__device__ inline void mask_scores(float (&s)[Traits::kRowTiles][Traits::kKeyTiles][4],
                                   const Interval* rows, const View& view, std::int64_t first) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int m = 0; m < Traits::kRowTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Interval row = rows[(warp * Traits::kRowTiles + m) * 16 + half * 8 + lane / 4];
      const int begin = static_cast<int>(max(row.begin - first, std::int64_t{0}));
      const int end = static_cast<int>(min(row.end - first, std::int64_t{Traits::kKeys}));
#pragma unroll
      for (int n = 0; n < Traits::kKeyTiles; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int key = n * 8 + lane % 4 * 2 + j;
          bool seen = key >= begin && key < end;
          if (view.table != nullptr) seen = sees(view, row, first + key);
          if (!seen) s[m][n][half * 2 + j] = -infinity();
        }
    }
}

/// ALiBi and qq_bias; `columns`: of the tile's keys.
template <class Traits>
__device__ inline void add_bias(float (&s)[Traits::kRowTiles][Traits::kKeyTiles][4],
                                const AttendParams& p, const Work& work, const int* columns) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int m = 0; m < Traits::kRowTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = (warp * Traits::kRowTiles + m) * 16 + half * 8 + lane / 4;
      const PackedRow at = packed_row(work, min(row, work.rows - 1));
      const RowBias bias(p.bias, query_row(p, work.sequence, at));
#pragma unroll
      for (int n = 0; n < Traits::kKeyTiles; ++n) {
        const int2 column = *reinterpret_cast<const int2*>(columns + n * 8 + lane % 4 * 2);
        float(&pair)[4] = s[m][n];
        if (p.bias.slopes) {
          pair[half * 2] = __fadd_rn(pair[half * 2], bias.alibi(column.x));
          pair[half * 2 + 1] = __fadd_rn(pair[half * 2 + 1], bias.alibi(column.y));
        }
        if (p.bias.qq) {
          pair[half * 2] = RowBias::add(pair[half * 2], bias.qq(column.x));
          pair[half * 2 + 1] = RowBias::add(pair[half * 2 + 1], bias.qq(column.y));
        }
      }
    }
}

/// Takes one tile's scores into the rows' maxima and sums, rescales O, and leaves P in s. The sums
/// stay apart in the four lanes of a row until sum_rows. `scale` is the factor from s to base 2.
template <class Traits>
__device__ inline void absorb_scores(float (&s)[Traits::kRowTiles][Traits::kKeyTiles][4],
                                     typename Traits::State& state, float scale) {
#pragma unroll
  for (int m = 0; m < Traits::kRowTiles; ++m) {
    float ratio[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Stats& row = state.stats[2 * m + half];
      float top = s[m][0][2 * half];
#pragma unroll
      for (int n = 0; n < Traits::kKeyTiles; ++n)
        top = fmaxf(top, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      top = fmaxf(row.max, __fmul_rn(top, scale));
      const float from = top == -infinity() ? 0.0f : top;  // nothing visible so far: P = 0
      ratio[half] = arch::exp2_fast(row.max - from);
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < Traits::kKeyTiles; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& p = s[m][n][2 * half + j];
          p = arch::exp2_fast(fmaf(p, scale, -from));
          sum = __fadd_rn(sum, p);
        }
      row.max = top;
      row.sum = fmaf(row.sum, ratio[half], sum);
    }
    // Maxima settle early; multiplying by 1 would not change a bit.
    if (__any_sync(~0u, ratio[0] != 1.0f || ratio[1] != 1.0f)) {
#pragma unroll
      for (int n = 0; n < Traits::kDimTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& o = state.o[m * Traits::kDimTiles + n][i];
          o = __fmul_rn(o, ratio[i / 2]);
        }
    }
  }
}

/// O += P V of the warp's rows; P is rounded to 16 bits.
template <class Traits>
__device__ inline void multiply_values(typename Traits::State& state,
                                       const float (&p)[Traits::kRowTiles][Traits::kKeyTiles][4],
                                       std::uint32_t values) {
  using T = typename Traits::Element;
  using Layout = Tile<T, Traits::kDim>;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < Traits::kKeys / 16; ++k) {
    std::uint32_t a[Traits::kRowTiles][4];
#pragma unroll
    for (int m = 0; m < Traits::kRowTiles; ++m) {
      a[m][0] = arch::pack<T>(p[m][2 * k][0], p[m][2 * k][1]);
      a[m][1] = arch::pack<T>(p[m][2 * k][2], p[m][2 * k][3]);
      a[m][2] = arch::pack<T>(p[m][2 * k + 1][0], p[m][2 * k + 1][1]);
      a[m][3] = arch::pack<T>(p[m][2 * k + 1][2], p[m][2 * k + 1][3]);
    }
#pragma unroll
    for (int n = 0; n < Traits::kDimTiles; n += 2) {
      std::uint32_t b[4];
      arch::load_matrices_transposed(b, values + Layout::offset(k * 16 + lane % 16, n + lane / 16));
#pragma unroll
      for (int m = 0; m < Traits::kRowTiles; ++m) {
        arch::mma<T>(state.o[m * Traits::kDimTiles + n], a[m], b[0], b[1]);
        arch::mma<T>(state.o[m * Traits::kDimTiles + n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

/// The sums of a row, from its four lanes; and what is empty by the definition of the algebra.
template <class State>
__device__ inline void sum_rows(State& state) {
#pragma unroll
  for (int r = 0; r < State::kRows; ++r) {
    float& sum = state.stats[r].sum;
    sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 1));
    sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 2));
  }
}

template <class Traits>
__device__ inline void store_rows(const AttendParams& p, const Plan& plan, const Sequence& sequence,
                                  const Work& work, const typename Traits::State& state) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int r = 0; r < Traits::State::kRows; ++r) {
    const int row = (warp * Traits::kRowTiles + r / 2) * 16 + r % 2 * 8 + lane / 4;
    if (row >= work.rows) continue;
    const Target to = target_of(p, plan, sequence, work, packed_row(work, row));
    const RowStore<4> store(p, to, state.stats[r]);
#pragma unroll
    for (int n = 0; n < Traits::kDimTiles; ++n) {
      if (n * 8 >= p.value_dim) break;
      const float* pair = &state.o[r / 2 * Traits::kDimTiles + n][r % 2 * 2];
      store(n * 8 + lane % 4 * 2, make_float2(pair[0], pair[1]));
    }
  }
}

// ---- the kernel -----------------------------------------------------------------------------

template <class Traits, bool kInvariant, Loader kLoader>
__global__ __launch_bounds__(Traits::kThreads, Traits::kBlocks) void attend_portable_kernel(
    const __grid_constant__ AttendParams p, const __grid_constant__ Plan plan) {
  using T = typename Traits::Element;
  constexpr int kKeys = Traits::kKeys;
  static_assert(sizeof(Piece<kInvariant>) <= Traits::kPieceBytes);
  std::byte* const shared = arch::shared_by_128;
  const std::uint32_t queries = arch::shared_address(shared);
  const std::uint32_t stages = queries + Traits::kQueryBytes;  // K0 V0 (K1 V1)
  Interval* rows = reinterpret_cast<Interval*>(shared + Traits::kQueryBytes +
                                               2 * Traits::kStages * Traits::kTileBytes);
  auto& piece = *reinterpret_cast<Piece<kInvariant>*>(rows + Traits::kRows);
  [[maybe_unused]] int* columns = reinterpret_cast<int*>(
      reinterpret_cast<std::byte*>(rows + Traits::kRows) + Traits::kPieceBytes);
  // Where every score is the product times a positive scale, the scale joins the exponential's fma.
  constexpr bool kGeneral = kLoader != Loader::plain;
  bool plain = p.score.softcap == 0.0f && p.score.scale > 0.0f;
  float scale = plain ? p.score.scale * kLog2E : 1.0f;
  const auto load = [&](const KvRows& source, int dim, const KeyTile& tile, std::uint32_t to) {
    if (tile.first >= 0)
      load_keys<T, Traits::kDim, kKeys, Traits::kThreads, kLoader>(
          to, source, dim, p, piece.work.kv_head, piece.sequence, piece.view, tile.first);
  };
  const auto load_k = [&](const KeyTile& tile, std::uint32_t to) {
    load(p.k, p.head_dim, tile, to);
  };
  const auto load_v = [&](const KeyTile& tile, std::uint32_t to) {
    load(p.v, p.value_dim, tile, to);
  };

  // The fast path has a block for each piece of work.
  for (int index = blockIdx.x; index < plan.works;
       index = kInvariant ? next_work(plan, index, &piece.index) : plan.works) {
    __syncthreads();  // the last piece of work is done with shared memory
    if (threadIdx.x == 0) {
      piece.work = work_of(p, plan, index);
      piece.sequence = sequence_of(p, piece.work.sequence);
      if constexpr (kGeneral) piece.scale = p.scale(piece.work.kv_head);
    }
    __syncthreads();
    if (piece.work.rows == 0) continue;
    load_queries<T, Traits::kDim, Traits::kRows, Traits::kThreads, kLoader>(
        queries, p, piece.sequence, piece.work);
    if (threadIdx.x < Traits::kRows) {
      const int row = min(static_cast<int>(threadIdx.x), piece.work.rows - 1);
      rows[threadIdx.x] =
          row_view(p, piece.sequence, packed_row(piece.work, row).token, piece.work.split);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      piece.view = tile_view(p, piece.sequence, piece.work.split, rows[0], rows[Traits::kRows - 1]);
      piece.template cut<kKeys>(p, tree_cut(p, plan, piece.work));
      piece.next[0] = piece.template first_tile<kKeys>();
    }
    __syncthreads();
    if constexpr (kGeneral) {
      plain = p.score.softcap == 0.0f && piece.scale > 0.0f && !p.bias;
      scale = plain ? piece.scale * kLog2E : 1.0f;
    }
    KeyTile tile = piece.next[0];
    load_k(tile, stages);
    if constexpr (Traits::kStages == 2) load_v(tile, stages + Traits::kTileBytes);
    arch::commit_copies();

    typename Traits::State state;
    state.clear();
    FoldStack<typename Traits::State, Traits::kThreads> stack(plan.stack, plan.depth);
    for (int parity = 0; tile.first >= 0; parity ^= 1) {
      if constexpr (kGeneral) {
        if (p.bias && threadIdx.x < kKeys)
          columns[parity * kKeys + threadIdx.x] =
              key_column(p, piece.sequence, piece.view, tile.first + threadIdx.x);
      }
      if (threadIdx.x == 0) piece.next[parity ^ 1] = piece.template tile_after<kKeys>(tile);
      arch::wait_copies<0>();
      __syncthreads();  // the tile (one stage: its K) is there, and what is loaded now is free
      const KeyTile next = piece.next[parity ^ 1];
      const int stage = Traits::kStages == 2 ? parity : 0;
      const std::uint32_t keys = stages + stage * 2 * Traits::kTileBytes;
      if constexpr (Traits::kStages == 2) {
        const std::uint32_t to = stages + (stage ^ 1) * 2 * Traits::kTileBytes;
        load_k(next, to);
        load_v(next, to + Traits::kTileBytes);
      } else {
        load_v(tile, keys + Traits::kTileBytes);
      }
      arch::commit_copies();

      float s[Traits::kRowTiles][Traits::kKeyTiles][4];
      multiply_keys<Traits>(s, queries, keys);
      if constexpr (Traits::kStages == 1) {
        arch::wait_copies<0>();
        __syncthreads();  // V is there, and nobody reads this K any more
        load_k(next, keys);
        arch::commit_copies();
      }
      if (!plain) {
        const Score score{kGeneral ? piece.scale : p.score.scale, p.score.softcap};
#pragma unroll
        for (int m = 0; m < Traits::kRowTiles; ++m)
#pragma unroll
          for (int n = 0; n < Traits::kKeyTiles; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) s[m][n][i] = score(s[m][n][i]);
        if constexpr (kGeneral) {
          if (p.bias) add_bias<Traits>(s, p, piece.work, columns + parity * kKeys);
        }
      }
      if (!piece.view.full(tile.first, kKeys)) mask_scores<Traits>(s, rows, piece.view, tile.first);
      absorb_scores<Traits>(s, state, scale);
      multiply_values<Traits>(state, s, keys + Traits::kTileBytes);

      const std::int64_t place = tile.place;
      tile = piece.next[parity ^ 1];
      if constexpr (kInvariant) {
        if (tile.first >= 0 && tile.place == place) continue;
        sum_rows(state);
        if constexpr (kGeneral) scale_values(state, p.v_scale, piece.work.kv_head);
        if (tile.first < 0) break;
        stack.finish_subtree(state, finished_level(place, tile.place));
        state.clear();
      }
    }
    if constexpr (kInvariant) {
      stack.fold_all(state);
    } else {
      sum_rows(state);
      if constexpr (kGeneral) scale_values(state, p.v_scale, piece.work.kv_head);
    }
    arch::wait_copies<0>();  // where there was no tile, the queries are still on their way
    store_rows<Traits>(p, plan, piece.sequence, piece.work, state);
  }
}

// ---- launch ---------------------------------------------------------------------------------

template <class T, int kDim, bool kInvariant, Loader kLoader>
KernelShape portable_shape() {
  using Traits = PortableTraits<T, kDim>;
  using Stack = FoldStack<typename Traits::State, Traits::kThreads>;
  constexpr int kBytes =
      Traits::kSharedBytes + (kLoader == Loader::plain ? 0 : Traits::kColumnBytes);
  static_assert(kBytes == bytes_of(Family::portable, kLoader, kDim, Traits::kRows));
  return {.tiled = attend_portable_kernel<Traits, kInvariant, kLoader>,
          .threads = Traits::kThreads,
          .shared_bytes = kBytes,
          .tile_rows = Traits::kRows,
          .state_bytes = kInvariant ? Stack::kStateBytes : 0,
          .resumes = true};
}

}  // namespace longspan::kernels::cuda
