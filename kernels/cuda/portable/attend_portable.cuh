// Attention of long queries with mma.sync: the algorithm of FlashAttention-2 for every GPU from
// sm_80 on.
//
//     S = Q K^T,   m' = max(m, max S),   P = exp2(S - m'),   l = l 2^(m - m') + sum P,
//     O = O 2^(m - m') + P V
//
// A block holds 128 packed rows; K and V stream through shared memory in tiles of 64 keys. A warp
// owns 32 rows (16 if dim is large): each fragment of K and V that it reads serves two mma,
// otherwise shared memory would be the limit. With kInvariant each segment of 128 keys is folded
// from scratch and the segments in the fixed order. If the row tiles alone do not fill the GPU,
// several blocks share the keys of one (WorkPlan::splits).
#pragma once

#include "kernels/cuda/arch/shared.cuh"
#include "kernels/cuda/common/bias.cuh"
#include "kernels/cuda/common/dropout.cuh"
#include "kernels/cuda/common/fold_stack.cuh"
#include "kernels/cuda/common/loader.cuh"
#include "kernels/cuda/common/next_work_tile.cuh"
#include "kernels/cuda/common/store_state.cuh"
#include "kernels/cuda/common/view.cuh"
#include "kernels/cuda/dispatch/attend.hpp"
#include "kernels/cuda/portable/row_views.cuh"

namespace longspan::kernels::cuda {

// ---- traits ---------------------------------------------------------------------------------

/// The traits of an instance. The larger of head_dim and value_dim is at most kDimOfInstance;
/// missing columns are zeros.
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

  // With two stages a tile is loaded while the one before it is processed. There is one stage if
  // two do not fit the 163 KB of sm_80: V is then loaded during Q K^T, and the next K during the
  // softmax and P V.
  static constexpr int kStages = kDim <= 192 ? 2 : 1;

  static constexpr int kTileBytes = kKeys * kDim * 2;
  static constexpr int kQueryBytes = kRows * kDim * 2;
  static constexpr int kWorkTileBytes = 512;
  static constexpr int kColumnBytes = 2 * kKeys * 4;  // for biases, by the parity of the tile
  static constexpr int kSharedBytes = kQueryBytes + 2 * kStages * kTileBytes +
                                      kRows * static_cast<int>(sizeof(Interval)) + kWorkTileBytes;

  struct RowOf {  // quad = row tile * kDimTiles + dim tile
    __device__ static constexpr int row(int quad, int i) { return quad / kDimTiles * 2 + i / 2; }
  };
  using State = ThreadState<2 * kRowTiles, kRowTiles * kDimTiles, RowOf>;
};

// ---- steps ----------------------------------------------------------------------------------

/// The next tile of keys and the index of its segment in the fixed order's tree.
struct KeyTile {
  std::int64_t first;  // local key; < 0: no tile is left
  std::int64_t place;
};

/// What all threads of a block know of its work tile. It is in shared memory, since the
/// accumulators leave no registers for it; thread 0 walks the tiles of keys, a barrier ahead of
/// their use.
template <bool kInvariant>
struct WorkTile {
  TileCoord work;
  Sequence sequence;
  View view;
  float scale;       // of the products of its kv head
  int index;         // of the next work tile
  KeyTile next[2];   // by the parity of the tile of keys
  Interval keys;     // fast: the part of the visible local keys that is its split
  SegmentWalk walk;  // invariant: used by thread 0

  /// Thread 0 takes its split of the visible keys. A fast split is a run of whole tiles.
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

  /// Thread 0 walks the tiles. They ascend, or follow the fixed order segment by segment.
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
  using Layout = SwizzledTile<typename Traits::Element, Traits::kDim>;
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

/// Sets scores of keys that a row does not see to -inf.
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

/// Adds ALiBi and qq_bias to the scores. `columns` are the columns of the tile's keys.
template <class Traits>
__device__ inline void add_bias(float (&s)[Traits::kRowTiles][Traits::kKeyTiles][4],
                                const AttendParams& p, const TileCoord& work, const int* columns) {
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

/// Adds one tile's scores to the rows' maxima and sums, rescales O, and leaves P in s. The sums
/// stay separate in the four lanes of a row until sum_rows. `scale` is the factor from s to base 2.
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
      const float from = top == -infinity() ? 0.0f : top;  // if nothing is visible so far, P = 0
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
    // Maxima settle early, and multiplying by 1 would not change a bit.
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

/// Which weights of a thread dropout drops, a bit for each: those of `row tile` and `half` are in
/// one word. They are found before the scores are made, which need the registers.
template <class Traits>
struct DroppedWeights {
  static_assert(2 * Traits::kKeyTiles <= 32);
  std::uint32_t bits[Traits::kRowTiles][2];

  /// `columns` are the columns of the tile's keys.
  __device__ void find(const AttendParams& p, const Sequence& sequence, const TileCoord& work,
                       const int* columns) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const PhiloxKey key = p.dropout.key();
#pragma unroll
    for (int m = 0; m < Traits::kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = (warp * Traits::kRowTiles + m) * 16 + half * 8 + lane / 4;
        const RowDropout dropout(p, key, sequence, packed_row(work, min(row, work.rows - 1)));
        std::uint32_t found = 0;
#pragma unroll 1
        for (int n = 0; n < Traits::kKeyTiles; ++n) {
          const int2 column = *reinterpret_cast<const int2*>(columns + n * 8 + lane % 4 * 2);
          found |= dropout.drops(column.x, column.y) << 2 * n;
        }
        bits[m][half] = found;
      }
  }

  /// Makes P of s.
  __device__ void drop(float (&s)[Traits::kRowTiles][Traits::kKeyTiles][4], float scale) const {
#pragma unroll
    for (int m = 0; m < Traits::kRowTiles; ++m)
#pragma unroll
      for (int n = 0; n < Traits::kKeyTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const bool dropped = (bits[m][i / 2] >> (2 * n + i % 2) & 1) != 0;
          s[m][n][i] = dropped ? 0.0f : __fmul_rn(s[m][n][i], scale);
        }
  }
};

/// O += P V of the warp's rows; P is rounded to 16 bits.
template <class Traits>
__device__ inline void multiply_values(typename Traits::State& state,
                                       const float (&p)[Traits::kRowTiles][Traits::kKeyTiles][4],
                                       std::uint32_t values) {
  using T = typename Traits::Element;
  using Layout = SwizzledTile<T, Traits::kDim>;
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

/// Adds up the sum of a row over its four lanes.
template <class State>
__device__ inline void sum_rows(State& state) {
#pragma unroll
  for (int r = 0; r < State::kRows; ++r) {
    float& sum = state.stats[r].sum;
    sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 1));
    sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 2));
  }
}

/// Ends a work tile: stores the states of its rows.
template <class Traits>
__device__ inline void store_rows(const AttendParams& p, const WorkPlan& plan,
                                  const Sequence& sequence, const TileCoord& work,
                                  const typename Traits::State& state) {
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

/// A block, with its shared memory and the steps from work tile to work tile.
template <class Traits, bool kInvariant, Loader kLoader>
class PortableBlock {
  using T = typename Traits::Element;
  using State = typename Traits::State;
  using Scores = float[Traits::kRowTiles][Traits::kKeyTiles][4];
  static constexpr int kKeys = Traits::kKeys;
  static constexpr bool kTwoStages = Traits::kStages == 2;
  static constexpr bool kGeneral = kLoader != Loader::plain;
  static_assert(sizeof(WorkTile<kInvariant>) <= Traits::kWorkTileBytes);

 public:
  __device__ __forceinline__ PortableBlock(const AttendParams& params, const WorkPlan& of_launch,
                                           std::byte* shared)
      : p_(params),
        plan_(of_launch),
        queries_(arch::shared_address(shared)),
        stages_(queries_ + Traits::kQueryBytes),
        rows_(reinterpret_cast<Interval*>(shared + Traits::kQueryBytes +
                                          2 * Traits::kStages * Traits::kTileBytes)),
        tile_(*reinterpret_cast<WorkTile<kInvariant>*>(rows_ + Traits::kRows)),
        columns_(reinterpret_cast<int*>(reinterpret_cast<std::byte*>(rows_ + Traits::kRows) +
                                        Traits::kWorkTileBytes)) {}

  /// Attends the block's work tiles. `plain`: every score is the product times a positive scale,
  /// which becomes part of the exponential's fma; `scale` is that factor, in base 2. Only a kv
  /// head's own scale changes them.
  __device__ __forceinline__ void run(bool plain, float scale) {
    // The fast path has a block for each work tile.
    for (int index = blockIdx.x; index < plan_.works;
         index = kInvariant ? next_work(plan_, index, &tile_.index) : plan_.works) {
      begin(index);
      if (tile_.work.rows == 0) continue;
      find_keys();
      if constexpr (kGeneral) {
        plain = p_.score.softcap == 0.0f && tile_.scale > 0.0f && !p_.bias;
        scale = plain ? tile_.scale * kLog2E : 1.0f;
      }
      KeyTile key_tile = tile_.next[0];
      load_k(key_tile, stages_);
      if constexpr (kTwoStages) load_v(key_tile, stages_ + Traits::kTileBytes);
      arch::commit_copies();

      State state;
      state.clear();
      FoldStack<State, Traits::kThreads> stack(plan_.stack, plan_.depth);
      for (int parity = 0; key_tile.first >= 0; parity ^= 1) {
        attend_tile(state, key_tile, parity, plain, scale);
        const std::int64_t place = key_tile.place;
        key_tile = tile_.next[parity ^ 1];
        if constexpr (kInvariant) {
          if (key_tile.first >= 0 && key_tile.place == place) continue;
          finish_sums(state);
          if (key_tile.first < 0) break;
          stack.finish_subtree(state, finished_level(place, key_tile.place));
          state.clear();
        }
      }
      if constexpr (kInvariant)
        stack.fold_all(state);
      else
        finish_sums(state);
      arch::wait_copies<0>();  // without a tile, the queries are still in flight
      store_rows<Traits>(p_, plan_, tile_.sequence, tile_.work, state);
    }
  }

 private:
  /// Thread 0 finds the work tile.
  __device__ __forceinline__ void begin(int index) {
    __syncthreads();  // the last work tile is done with shared memory
    if (threadIdx.x == 0) {
      tile_.work = work_of(p_, plan_, index);
      tile_.sequence = sequence_of(p_, tile_.work.sequence);
      if constexpr (kGeneral) tile_.scale = p_.scale(tile_.work.sequence, tile_.work.kv_head);
    }
    __syncthreads();
  }

  /// Queues the loads of the queries, and finds what the rows see and the first tile of keys.
  __device__ __forceinline__ void find_keys() {
    load_queries<T, Traits::kDim, Traits::kRows, Traits::kThreads, kLoader>(
        queries_, p_, tile_.sequence, tile_.work);
    find_row_views<Traits::kRows>(rows_, p_, tile_.sequence, tile_.work);
    __syncthreads();
    if (threadIdx.x == 0) {
      tile_.view =
          tile_view(p_, tile_.sequence, tile_.work.split, rows_[0], rows_[Traits::kRows - 1]);
      tile_.template cut<kKeys>(p_, tree_cut(p_, plan_, tile_.work));
      tile_.next[0] = tile_.template first_tile<kKeys>();
    }
    __syncthreads();
  }

  __device__ __forceinline__ void load(const KvRows& source, int dim, const KeyTile& key_tile,
                                       std::uint32_t to) {
    if (key_tile.first >= 0)
      load_keys<T, Traits::kDim, kKeys, Traits::kThreads, kLoader>(
          to, source, dim, p_, tile_.work.kv_head, tile_.sequence, tile_.view, key_tile.first);
  }
  __device__ __forceinline__ void load_k(const KeyTile& key_tile, std::uint32_t to) {
    load(p_.k, p_.head_dim, key_tile, to);
  }
  __device__ __forceinline__ void load_v(const KeyTile& key_tile, std::uint32_t to) {
    load(p_.v, p_.value_dim, key_tile, to);
  }

  /// Attends one tile of keys, while the next is loaded. plain, scale: as in run.
  __device__ __forceinline__ void attend_tile(State& state, const KeyTile& key_tile, int parity,
                                              bool plain, float scale) {
    if constexpr (kGeneral) {
      if ((p_.bias || p_.dropout) && threadIdx.x < kKeys)
        columns_[parity * kKeys + threadIdx.x] =
            key_column(p_, tile_.sequence, tile_.view, key_tile.first + threadIdx.x);
    }
    if (threadIdx.x == 0) tile_.next[parity ^ 1] = tile_.template tile_after<kKeys>(key_tile);
    arch::wait_copies<0>();
    __syncthreads();  // the tile (one stage: its K) is there, and what is loaded now is free
    const KeyTile next = tile_.next[parity ^ 1];
    const int stage = kTwoStages ? parity : 0;
    const std::uint32_t keys = stages_ + stage * 2 * Traits::kTileBytes;
    if constexpr (kTwoStages) {
      const std::uint32_t to = stages_ + (stage ^ 1) * 2 * Traits::kTileBytes;
      load_k(next, to);
      load_v(next, to + Traits::kTileBytes);
    } else {
      load_v(key_tile, keys + Traits::kTileBytes);
    }
    arch::commit_copies();

    [[maybe_unused]] DroppedWeights<Traits> dropped;
    if constexpr (kGeneral) {
      if (p_.dropout) dropped.find(p_, tile_.sequence, tile_.work, columns_ + parity * kKeys);
    }
    Scores s;
    multiply_keys<Traits>(s, queries_, keys);
    if constexpr (!kTwoStages) {
      arch::wait_copies<0>();
      __syncthreads();  // V is there, and nobody reads this K any more
      load_k(next, keys);
      arch::commit_copies();
    }
    if (!plain) score_products(s, parity);
    if (!tile_.view.full(key_tile.first, kKeys))
      mask_scores<Traits>(s, rows_, tile_.view, key_tile.first);
    absorb_scores<Traits>(s, state, scale);
    if constexpr (kGeneral) {
      if (p_.dropout) dropped.drop(s, p_.dropout.scale);
    }
    multiply_values<Traits>(state, s, keys + Traits::kTileBytes);
  }

  /// Products become scores in base 2, with their cap and biases.
  __device__ __forceinline__ void score_products(Scores& s, int parity) {
    const Score score{kGeneral ? tile_.scale : p_.score.scale, p_.score.softcap};
#pragma unroll
    for (int m = 0; m < Traits::kRowTiles; ++m)
#pragma unroll
      for (int n = 0; n < Traits::kKeyTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[m][n][i] = score(s[m][n][i]);
    if constexpr (kGeneral) {
      if (p_.bias) add_bias<Traits>(s, p_, tile_.work, columns_ + parity * kKeys);
    }
  }

  /// Completes the state of everything attended since it was cleared.
  __device__ __forceinline__ void finish_sums(State& state) {
    sum_rows(state);
    if constexpr (kGeneral)
      scale_values(state, p_.v_scale, tile_.work.sequence, tile_.work.kv_head);
  }

  const AttendParams& p_;
  const WorkPlan& plan_;
  const std::uint32_t queries_;
  const std::uint32_t stages_;  // K0 V0 (K1 V1)
  Interval* const rows_;        // what each row sees
  WorkTile<kInvariant>& tile_;
  int* const columns_;  // of biases and dropout, for the keys of two tiles
};

template <class Traits, bool kInvariant, Loader kLoader>
__global__ __launch_bounds__(Traits::kThreads, Traits::kBlocks) void attend_portable_kernel(
    const __grid_constant__ AttendParams p, const __grid_constant__ WorkPlan plan) {
  const bool plain = p.score.softcap == 0.0f && p.score.scale > 0.0f;
  const float scale = plain ? p.score.scale * kLog2E : 1.0f;
  PortableBlock<Traits, kInvariant, kLoader>(p, plan, arch::shared_by_128).run(plain, scale);
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
