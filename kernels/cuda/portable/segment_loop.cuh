// The outer loop of the kernels for fp32 tensors: over work tiles, over the segments of 128 keys
// that a tile's rows see, and over slices of a segment's keys and values in shared memory. Each
// segment is attended from scratch and folded in the fixed order. A policy multiplies: FFMA
// (attend_fp32.cuh) or products of tf32 (attend_tf32.cuh).
//
// Keys and values are loaded by cp.async if their rows are plain fp32, and through registers if
// they have another type or layout.
#pragma once

#include "kernels/cuda/arch/shared.cuh"
#include "kernels/cuda/arch/sm80.cuh"
#include "kernels/cuda/common/bias.cuh"
#include "kernels/cuda/common/dropout.cuh"
#include "kernels/cuda/common/fold_stack.cuh"
#include "kernels/cuda/common/next_work_tile.cuh"
#include "kernels/cuda/common/store_state.cuh"
#include "kernels/cuda/common/view.cuh"
#include "kernels/cuda/portable/row_views.cuh"

namespace longspan::kernels::cuda {

// ---- loads ----------------------------------------------------------------------------------

/// Elements d ... d + 3 of a row that begins at element `row`, as fp32 (exact); zeros from `dim`
/// on.
__device__ inline float4 load_four(const KvRows& source, DType dtype, std::int64_t row, int d,
                                   int dim) {
  const auto element = [&](int i) {
    return d + i < dim ? load_element(source.data, dtype, row + source.column(d + i)) : 0.0f;
  };
  return make_float4(element(0), element(1), element(2), element(3));
}

/// The same of a row that carries its scales. Groups are of whole fours.
__device__ inline float4 load_four(const StoredRow& row, const RowFormat& format, int d, int dim) {
  const auto number = [&](int i) { return d + i < dim ? load_number(row, format, d + i) : 0.0f; };
  return make_float4(number(0), number(1), number(2), number(3));
}

/// Whether 16 bytes at a time may be read from every fp32 row. In pages of one key the pitch of
/// rows is that of pages.
__device__ inline bool aligned_rows(const Rows& rows, const Pages& pages,
                                    std::int64_t page_stride) {
  const bool one = pages && pages.size == 1;
  return reinterpret_cast<std::uintptr_t>(rows.data) % 16 == 0 &&
         (one || rows.row_stride % 4 == 0) && rows.head_stride % 4 == 0 &&
         (!pages || page_stride % 4 == 0);
}

/// The element at which a key's row of one head begins.
__device__ inline std::int64_t stored_row(const KvRows& source, const Pages& pages,
                                          const Sequence& sequence, std::int64_t key, int kv_head) {
  const std::int64_t head = kv_head * source.head_stride;
  if (!pages) return head + (sequence.first_key + key) * source.row_stride;
  return head + pages.page(sequence.index, key) * source.page_stride +
         key % pages.size * source.row_stride;
}

/// The same of keys that carry their scales.
__device__ inline StoredRow stored_row(const KvRows& source, const Pages& pages,
                                       const Sequence& sequence, std::int64_t key) {
  if (!pages) return source.stored(0, sequence.first_key + key);
  return source.stored(pages.page(sequence.index, key), key % pages.size);
}

/// Loads columns [column, column + kColumns) of kCount keys into shared memory, with zeros for keys
/// that no row sees and past `dim`.
template <class Traits, int kColumns, int kCount>
__device__ inline void load_fp32(float* to, int stride, const AttendParams& p, const KvRows& source,
                                 int dim, int kv_head, const Sequence& sequence, const View& view,
                                 std::int64_t first, int column) {
  // Whether cp.async may load the rows; those of another type or layout go through registers.
  const bool direct =
      Traits::kPlain || (p.kv_dtype == DType::fp32 && source.dense() && dim % 4 == 0 &&
                         aligned_rows(source, p.pages, source.page_stride));
  for (int index = static_cast<int>(threadIdx.x); index < kCount * kColumns / 4;
       index += Traits::kThreads) {
    const int row = index / (kColumns / 4), quad = index % (kColumns / 4) * 4;
    const std::int64_t key = first + row;
    bool valid = view.any.contains(key) && column + quad < dim;
    if (view.table != nullptr && valid) valid = view.positions.contains(view.table[key]);
    float* place = to + row * stride + quad;
    const float* from = static_cast<const float*>(source.data);
    if constexpr (Traits::kPlain) {
      if (valid) from = source.at<const float>(sequence.first_key + key, kv_head) + column + quad;
    } else {
      if (is_latent_row(p.kv_dtype)) {
        float4 four{};
        if (valid)
          four = load_four(stored_row(source, p.pages, sequence, key), row_format_of(p.kv_dtype),
                           column + quad, dim);
        *reinterpret_cast<float4*>(place) = four;
        continue;
      }
      const std::int64_t offset =
          valid ? stored_row(source, p.pages, sequence, key, kv_head) : std::int64_t{0};
      if (!direct) {
        *reinterpret_cast<float4*>(place) =
            valid ? load_four(source, p.kv_dtype, offset, column + quad, dim) : float4{};
        continue;
      }
      if (valid) from += offset + column + quad;
    }
    arch::copy_async(arch::shared_address(place), from, valid);
  }
  arch::commit_copies();
}

/// Loads the packed rows' queries into shared memory, with zeros past the last row and dim.
template <class Traits>
__device__ inline void load_fp32_queries(float* queries, const AttendParams& p,
                                         const Sequence& sequence, const TileCoord& work) {
  const bool direct = Traits::kPlain || (p.q_dtype == DType::fp32 && p.head_dim % 4 == 0 &&
                                         aligned_rows(p.q, {}, 0) && p.q.gap.elements % 4 == 0);
  for (int i = static_cast<int>(threadIdx.x); i < Traits::kRows * Traits::kDim / 4;
       i += Traits::kThreads) {
    const int row = i / (Traits::kDim / 4), d = i % (Traits::kDim / 4) * 4;
    const bool valid = row < work.rows && d < p.head_dim;
    const PackedRow at = packed_row(work, row);
    const std::int64_t offset =
        valid ? p.q.offset(sequence.first_row + at.token, at.head) + d : std::int64_t{0};
    float* place = queries + row * Traits::kQueryStride + d;
    if (direct) {
      arch::copy_async(arch::shared_address(place), static_cast<const float*>(p.q.data) + offset,
                       valid);
    } else {
#pragma unroll
      for (int n = 0; n < 4; ++n)
        place[n] =
            valid && d + n < p.head_dim ? load_element(p.q.data, p.q_dtype, offset + n) : 0.0f;
    }
  }
  arch::commit_copies();  // also if no segment follows: the next work tile waits for them
}

// ---- the loop -------------------------------------------------------------------------------

/// The shared memory of a block. `scratch` is the policy's own.
template <class Traits>
struct SegmentShared {
  static constexpr int kSliceFloats =
      Traits::kKeyFloats > Traits::kValueFloats ? Traits::kKeyFloats : Traits::kValueFloats;
  static constexpr int kBytes =
      4 * (Traits::kRows * Traits::kQueryStride + kSliceFloats + Traits::kScratchWords) +
      Traits::kRows * static_cast<int>(sizeof(Interval)) + 16;

  __device__ __forceinline__ explicit SegmentShared(std::byte* memory)
      : queries(reinterpret_cast<float*>(memory)),
        slice(queries + Traits::kRows * Traits::kQueryStride),
        scratch(slice + kSliceFloats),
        views(reinterpret_cast<Interval*>(scratch + Traits::kScratchWords)),
        next_index(reinterpret_cast<int*>(views + Traits::kRows)) {}

  float* queries;   // [kRows, kQueryStride]
  float* slice;     // keys [kSegment, kKeyStride] or values [kSliceKeys, kValueStride]
  float* scratch;   // [kScratchWords]
  Interval* views;  // [kRows]
  int* next_index;
};

/// Products has the traits of the instance, and the steps of one segment:
///
///     Scores                                  a thread's scores of the segment, an array
///     busy(work)                              whether the warp has rows, as a type where it is
///                                             known, so that nothing is tested; all warps load
///     find_columns(...)                       before the slice of dims from d on is multiplied
///     multiply_keys(s, d)                     s += Q K^T over the dims of the slice from d on
///     weigh(s, ..., state)                    s becomes P; maxima and sums go into the state
///     multiply_values(state, s, key)          O += P V over the keys of the slice from `key` on
///     store(...)                              the epilogue
template <class Products, class Traits = typename Products::Traits>
__global__ __launch_bounds__(Traits::kThreads, Traits::kBlocks) void attend_segments_kernel(
    const __grid_constant__ AttendParams p, const __grid_constant__ WorkPlan plan) {
  const SegmentShared<Traits> shared(arch::shared_by_128);
  const Products products(shared);

  for (int index = blockIdx.x; index < plan.works;
       index = next_work(plan, index, shared.next_index)) {
    const TileCoord work = work_of(p, plan, index);
    if (work.rows == 0) continue;
    const auto busy = products.busy(work);
    const Sequence sequence = sequence_of(p, work.sequence);
    __syncthreads();  // the last work tile is done with shared memory
    load_fp32_queries<Traits>(shared.queries, p, sequence, work);
    find_row_views<Traits::kRows>(shared.views, p, sequence, work);
    __syncthreads();
    const View view =
        tile_view(p, sequence, work.split, shared.views[0], shared.views[Traits::kRows - 1]);
    const TreeCut cut = tree_cut(p, plan, work);
    SegmentWalk walk(p.shard.for_sequence(work.sequence).order(sequence.kv_len), view.any,
                     cut.split, cut.splits);
    typename Traits::State state;
    state.clear();
    typename Traits::Stack stack(plan.stack, plan.depth);
    bool more = walk.next();
    while (more) {
      const std::int64_t first = walk.segment * kSegment, place = walk.place;
      typename Products::Scores s = {};
#pragma unroll 1
      for (int d = 0; d < p.head_dim; d += Traits::kSliceDims) {
        __syncthreads();  // every warp is done with the last slice
        load_fp32<Traits, Traits::kSliceDims, kSegment>(shared.slice, Traits::kKeyStride, p, p.k,
                                                        p.head_dim, work.kv_head, sequence, view,
                                                        first, d);
        products.find_columns(p, sequence, view, first, d);
        arch::wait_copies<0>();
        __syncthreads();  // the slice is there
        if (busy) products.multiply_keys(s, d);
      }
      state.clear();
      if (busy) products.weigh(s, p, sequence, work, view, first, state);
#pragma unroll 1
      for (int key = 0; key < kSegment; key += Traits::kSliceKeys) {
        __syncthreads();  // every warp is done with the last slice
        load_fp32<Traits, Traits::kValueDim, Traits::kSliceKeys>(shared.slice, Traits::kValueStride,
                                                                 p, p.v, p.value_dim, work.kv_head,
                                                                 sequence, view, first + key, 0);
        arch::wait_copies<0>();
        __syncthreads();  // the slice is there
        if (busy) products.multiply_values(state, s, key);
      }
      if constexpr (!Traits::kPlain) scale_values(state, p.v_scale, work.sequence, work.kv_head);
      more = walk.next();
      if (more && busy) stack.finish_subtree(state, finished_level(place, walk.place));
    }
    if (busy) stack.fold_all(state);
    arch::wait_copies<0>();
    products.store(p, plan, sequence, work, state);
  }
}

}  // namespace longspan::kernels::cuda
