// Attention of short queries, where reading the keys is the work. Keys are the long side of every
// product, so that a group's few rows waste nothing:
//
//     S^T = K Q^T     16 keys x 8 rows at a time, a segment of 128 keys in registers
//     O^T += V^T P^T  P^T is S^T's fragment transposed in registers
//
// One warp of a block loads (decode_stream.cuh), the others multiply (decode_block.cuh says who
// passes what to whom). A consumer works on a segment alone: no barrier stands between a key and
// its value, and the warps of a multiprocessor hide each other's latencies. Up to eight packed rows
// are one warp's; more rows are a team's, whose warps share the keys.
//
// A segment's state is small; segments fold in the fixed order, always. A block takes an aligned
// part of the order's tree, so the number of parts fills the GPU and never changes a bit; how the
// parts become one, and the row's end, is in decode_finish.cuh.
#pragma once

#include "kernels/cuda/arch/overlap.cuh"
#include "kernels/cuda/attend.hpp"
#include "kernels/cuda/bias.cuh"
#include "kernels/cuda/decode_finish.cuh"
#include "kernels/cuda/decode_stream.cuh"
#include "kernels/cuda/decode_work.cuh"
#include "kernels/cuda/instances/dims.hpp"
#include "kernels/cuda/loader.cuh"

namespace longspan::kernels::cuda {

// ---- steps ----------------------------------------------------------------------------------

/// The rows of a warp as the products' second factor: for each 16 columns two registers.
template <class Traits>
struct DecodeQueries {
  std::uint32_t word[Traits::kSlices][2];

  __device__ __forceinline__ void load(const AttendParams& p, const Sequence& sequence,
                                       const Work& work, int first_row) {
    using T = typename Traits::Element;
    const int lane = threadIdx.x % 32;
    const int row = first_row + lane / 4;
    const bool valid = row < work.rows;
    const PackedRow at = packed_row(work, valid ? row : 0);
    const std::int64_t from = (sequence.first_row + at.token) * p.q.row_stride +
                              static_cast<std::int64_t>(at.head) * p.q.head_stride;
#pragma unroll
    for (int slice = 0; slice < Traits::kSlices; ++slice)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int d = slice * 16 + half * 8 + lane % 4 * 2;
        word[slice][half] =
            valid && d < p.dim ? load_query_pair<T, Traits::kLoader>(p, from + d) : 0u;
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

/// s = K Q^T for a step's tiles of 16 keys and the warp's rows.
template <class Traits>
__device__ __forceinline__ void multiply_keys(float (*s)[4], const DecodeStream<Traits>& stream,
                                              int stage, const DecodeOffsets<Traits>& offset,
                                              const DecodeQueries<Traits>& queries) {
  using T = typename Traits::Element;
#pragma unroll
  for (int tile = 0; tile < Traits::kStepTiles; ++tile)
#pragma unroll
    for (int i = 0; i < 4; ++i) s[tile][i] = 0.0f;
#pragma unroll
  for (int first = 0; first < Traits::kStepTiles; first += Traits::kPair)
#pragma unroll
    for (int slice = 0; slice < Traits::kSlices; ++slice)
#pragma unroll
      for (int tile = first; tile < first + Traits::kPair; ++tile) {
        std::uint32_t a[4];
        arch::load_matrices(a, stream.tile(stage, tile) + offset(slice));
        arch::mma<T>(s[tile], a, queries.word[slice][0], queries.word[slice][1]);
      }
}

/// O^T += V^T P^T for a step's tiles of 16 keys.
template <class Traits>
__device__ __forceinline__ void multiply_values(typename Traits::State& state,
                                                const DecodeStream<Traits>& stream, int stage,
                                                const DecodeOffsets<Traits>& offset,
                                                const std::uint32_t (*weights)[2]) {
  using T = typename Traits::Element;
#pragma unroll
  for (int tile = 0; tile < Traits::kStepTiles; ++tile)
#pragma unroll
    for (int slice = 0; slice < Traits::kSlices; ++slice) {
      std::uint32_t a[4];
      arch::load_matrices_transposed(a, stream.tile(stage, tile) + offset(slice));
      arch::mma<T>(state.o[slice], a, weights[tile][0], weights[tile][1]);
    }
}

/// What a warp's rows see, and how they score.
template <class Traits>
struct DecodeRows {
  const DecodePiece& piece;
  const Interval* views;  // [kRows] of the piece
  const PackedRow* rows;  // [kRows], for biases
  int first;              // of the warp's
};

/// What is rare stands apart, so that the loop over segments stays near: a tile's scores of a
/// cap...
__device__ __noinline__ inline float4 cap_apart(float4 s, Score score) {
  return make_float4(score(s.x), score(s.y), score(s.z), score(s.w));
}
/// ... and of keys that not every row sees. Keys `key` and `key` + 8 of rows a and b.
__device__ __noinline__ inline float4 mask_apart(float4 s, const View& view, const Interval& a,
                                                 const Interval& b, std::int64_t key) {
  const float hidden = -infinity();
  return make_float4(sees(view, a, key) ? s.x : hidden, sees(view, b, key) ? s.y : hidden,
                     sees(view, a, key + 8) ? s.z : hidden, sees(view, b, key + 8) ? s.w : hidden);
}

/// Products -> scores in base 2; -inf where the row does not see the key.
template <class Traits>
__device__ __forceinline__ void score_segment(float (&s)[Traits::kTiles][4], const AttendParams& p,
                                              const DecodeRows<Traits>& rows, std::int64_t index) {
  const int lane = threadIdx.x % 32, row = rows.first + lane % 4 * 2;  // and row + 1
  const View& view = rows.piece.view;
  const std::int64_t first = index * kSegment;
  const auto all = [&](const auto& of) {
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
      const float4 x = of(make_float4(s[tile][0], s[tile][1], s[tile][2], s[tile][3]), tile);
      s[tile][0] = x.x, s[tile][1] = x.y, s[tile][2] = x.z, s[tile][3] = x.w;
    }
  };
  Score score = p.score;
  if constexpr (!Traits::kPlain) score.scale = rows.piece.score_scale;
  if (score.softcap == 0.0f) {
    const float scale = score.scale * kLog2E;
    all([&](float4 x, int) {
      return make_float4(x.x * scale, x.y * scale, x.z * scale, x.w * scale);
    });
  } else {
    all([&](float4 x, int) { return cap_apart(x, score); });
  }
  const auto key_of = [&](int tile) { return first + tile * Traits::kTile + lane / 4; };
  if (!view.full(first, kSegment))
    all([&](float4 x, int tile) {
      return mask_apart(x, view, rows.views[row], rows.views[row + 1], key_of(tile));
    });
  if constexpr (!Traits::kPlain) {
    if (!p.bias) return;
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int column = key_column(p, rows.piece.sequence, view, key_of(tile) + 8 * half);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const RowBias bias(p.bias, rows.rows[row + j]);
          float& x = s[tile][half * 2 + j];
          x = RowBias::add(x, bias.alibi(column) + bias.qq(column));
        }
      }
  }
}

/// Scores -> P^T as the products' second factor, and the segment's maxima and sums: over a lane's
/// keys, then over the lanes, in one order.
template <class Traits>
__device__ __forceinline__ void weigh_segment(float (&s)[Traits::kTiles][4],
                                              std::uint32_t (&weights)[Traits::kTiles][2],
                                              Stats (&stats)[2]) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    float top = -infinity();
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile)
      top = fmaxf(top, fmaxf(s[tile][j], s[tile][2 + j]));
#pragma unroll
    for (int step = 4; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
    const float from = top == -infinity() ? 0.0f : top;  // nothing visible: P = 0
    float sum = 0.0f;
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& x = s[tile][half * 2 + j];
        x = arch::exp2_fast(__fadd_rn(x, -from));
        sum = __fadd_rn(sum, x);
      }
#pragma unroll
    for (int step = 4; step < 32; step *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, step));
    stats[j] = {top, sum};
  }
#pragma unroll
  for (int tile = 0; tile < Traits::kTiles; ++tile)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      weights[tile][half] = arch::transpose_matrix(
          arch::pack<typename Traits::Element>(s[tile][half * 2], s[tile][half * 2 + 1]));
}

/// As scale_values, by a scale that is at hand.
template <class State>
__device__ inline void scale_state(State& state, float scale) {
#pragma unroll
  for (auto& quad : state.o)
#pragma unroll
    for (float& o : quad) o = __fmul_rn(o, scale);
}

// ---- a consumer -----------------------------------------------------------------------------

template <class Traits>
__device__ __forceinline__ void consume(const AttendParams& p, const Plan& plan,
                                        const KeyBoxes& boxes, const DecodeEnd& end,
                                        DecodeShared<Traits>& shared) {
  using Stack = typename Traits::Stack;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int group = warp / Traits::kTeam, first_row = warp % Traits::kTeam * Traits::kWarpRows;
  const DecodeOffsets<Traits> key_offset(lane % 16, lane / 16);
  const DecodeOffsets<Traits> value_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  DecodeStream<Traits> stream(p, boxes, shared);
  DecodeQueries<Traits> queries{};
  typename Traits::State state;
  int node = -1;  // in work, of kGroupNodes; < 0: none of the piece
  Stack stack(plan.stack, plan.depth);
  // The first turn is a rehearsal, while the finder looks for the first keys: of whatever stands in
  // shared memory, and to no end. Code comes from memory when it is first run, for each launch anew
  // where the keys before have driven it out of the caches, and would keep the first keys waiting.
  constexpr std::int8_t kOwnPlace = DecodeShared<Traits>::kPieces;
  const DecodeSegment rehearsal{0, 0, Stack::kAll, kOwnPlace, true};
  for (bool is_real = false;; is_real = true) {
    const DecodeSegment segment = is_real ? stream.take() : rehearsal;
    if (segment.piece < 0) return;
    const DecodePiece& piece = shared.piece[segment.piece];
    if (node < 0 && is_real) {
      node = 0;
      queries.load(p, piece.sequence, piece.work, first_row);
    }
    const int row = shared.row_of(node <= 0 ? group : Traits::kNodes - 1 - group);
    state.clear();
    if (segment.index >= 0) {
      float s[Traits::kTiles][4];
#pragma unroll
      for (int step = 0; step < Traits::kSteps; ++step) {
        const int stage = step * Traits::kStepStages;
        if (is_real) stream.acquire(stage);
        multiply_keys<Traits>(s + step * Traits::kStepTiles, stream, stage, key_offset, queries);
        if (is_real) stream.release(stage);
      }
      const DecodeRows<Traits> rows{piece, shared.views[segment.piece], shared.rows[segment.piece],
                                    first_row};
      score_segment<Traits>(s, p, rows, segment.index);
      std::uint32_t weights[Traits::kTiles][2];
      weigh_segment<Traits>(s, weights, state.stats);
#pragma unroll
      for (int step = 0; step < Traits::kSteps; ++step) {
        const int stage = Traits::kKeyStages + step * Traits::kStepStages;
        if (is_real) stream.acquire(stage);
        multiply_values<Traits>(state, stream, stage, value_offset,
                                weights + step * Traits::kStepTiles);
        if (is_real) stream.release(stage);
      }
      if constexpr (!Traits::kPlain)
        if (p.v_scale) scale_state(state, piece.value_scale);
      stack.fold(state, segment.level,
                 shared.o[row]);  // the node's own rows are free until its end
    }
    if (is_real) stream.end_segment();
    if (segment.level != Stack::kAll) continue;
    decode::keep_node<Traits>(shared, row, state);
    if (is_real && ++node < Traits::kGroupNodes) continue;
    node = -1;
    decode::finish_piece<Traits>(p, plan, end, shared, piece, is_real);
    sync_consumers<Traits>();
    if (lane == 0 && is_real) shared.piece_empty[segment.piece].arrive();
  }
}

// ---- the kernel -----------------------------------------------------------------------------

template <class Traits>
__global__ __launch_bounds__(Traits::kThreads, Traits::kBlocks) void attend_decode_kernel(
    const __grid_constant__ AttendParams p, const __grid_constant__ Plan plan,
    const __grid_constant__ KeyBoxes boxes, const __grid_constant__ DecodeEnd end) {
  extern __shared__ __align__(1024) std::byte memory[];
  auto& shared = *reinterpret_cast<DecodeShared<Traits>*>(memory);
  if (threadIdx.x / 32 == Traits::kWarps) {
    DecodeFinder<Traits> finder(p, plan, shared);
    __syncthreads();
    arch::wait_for_kernels_before();  // the others do nothing before the finder has
    finder.run();
    arch::let_next_kernel_start();  // an exchange, which then waits there for the states
  } else {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) arch::prefetch_map(&boxes.k);
    if (threadIdx.x == 32) arch::prefetch_map(&boxes.v);
#endif
    shared.init(threadIdx.x);
    __syncthreads();
    consume<Traits>(p, plan, boxes, end, shared);
  }
}

template <class T, int kDim, int kGroups, Loader kLoader>
KernelShape decode_shape() {
  using Traits = DecodeTraits<T, kDim, kGroups, kLoader>;
  KernelShape shape{reinterpret_cast<const void*>(&attend_decode_kernel<Traits>), Traits::kThreads,
                    static_cast<int>(sizeof(DecodeShared<Traits>)), Traits::kRows,
                    Traits::Stack::kStateBytes};
  shape.groups = Traits::kGroups;
  shape.box_dim = Traits::kDim;
  return shape;
}

/// The instance for sequences of about `rows` packed rows.
template <class T, Loader kLoader>
KernelShape decode_for(int dim, std::int64_t rows) {
  const auto shape = [&](auto size) {
    constexpr int kDim = decltype(size)::value;
    if (rows <= 8) return decode_shape<T, kDim, 4, kLoader>();
    if (rows <= 16) return decode_shape<T, kDim, 2, kLoader>();
    return decode_shape<T, kDim, 1, kLoader>();
  };
  return for_general_dim(dim, shape);
}

// The instances that are not plain, one file each.
KernelShape decode_bf16_any16(int dim, std::int64_t rows);
KernelShape decode_bf16_any8(int dim, std::int64_t rows);
KernelShape decode_fp16_any16(int dim, std::int64_t rows);
KernelShape decode_fp16_any8(int dim, std::int64_t rows);

}  // namespace longspan::kernels::cuda
