// A tile of 16-bit rows in shared memory. The 16-byte chunks of a row are permuted by XOR with the
// row's index, so that ldmatrix (eight rows, one chunk each) and cp.async (eight chunks of one row)
// both touch all 32 banks. loader.cuh fills tiles from caches in any layout.
#pragma once

#include <cstdint>

#include "kernels/cuda/arch/sm80.cuh"
#include "kernels/cuda/common/view.cuh"

namespace longspan::kernels::cuda {

///
/// With kPanelRows > 0, each kPanelRows rows are cut into panels of 64 columns (32 if dim is not a
/// multiple of 64), one after another. This is the layout of TMA, which uses the same permutation.
template <class T, int kDim, int kPanelRows = 0>
struct SwizzledTile {
  static constexpr int kChunks = kDim / 8;                  // 16-byte chunks in a row
  static constexpr int kPeriod = kChunks % 8 == 0 ? 8 : 4;  // chunks that are permuted
  static constexpr int kPanels = kPanelRows > 0 ? kChunks / kPeriod : 1;
  static constexpr int kRowBytes = kDim * 2 / kPanels;
  static constexpr int kPanelBytes = kPanelRows * kRowBytes;

  /// The number by which a row's chunks are permuted. Rows of an odd number of half lines already
  /// alternate between two halves of the banks, so there the row's next two bits are enough.
  __device__ static constexpr int swizzle(int row) {
    return kPeriod == 8 ? row & 7 : (row >> 1) & 3;
  }
  /// The byte offset of a chunk.
  __device__ static constexpr int offset(int row, int chunk) {
    if constexpr (kPanelRows == 0)
      return row * kRowBytes + ((chunk ^ swizzle(row)) << 4);
    else
      return row / kPanelRows * (kPanelRows * kDim * 2) + chunk / kPeriod * kPanelBytes +
             row % kPanelRows * kRowBytes + ((chunk % kPeriod ^ swizzle(row)) << 4);
  }
};

/// Queues the copy of kKeys keys of one kv head, from local key `first` on, into a tile. The rows
/// are contiguous and dense, of 16-bit elements, and aligned to 16 bytes. Keys that no row of the
/// row tile may see, and columns past `dim`, become zeros.
template <class T, int kDim, int kKeys, int kThreads, int kPanelRows = 0>
__device__ inline void load_plain(std::uint32_t tile, const Rows& source, int dim, int kv_head,
                                  const Sequence& sequence, const View& view, std::int64_t first) {
  using Layout = SwizzledTile<T, kDim, kPanelRows>;
  constexpr int kStepRows = kThreads / Layout::kChunks;
  const T* base = source.at<const T>(sequence.first_key + first, kv_head);
  if constexpr (kThreads % Layout::kChunks == 0 && kKeys % kStepRows == 0) {
    if (view.table == nullptr) {
      // The common tile: a run of keys is wanted. A thread keeps its chunk from row to row.
      const int chunk = static_cast<int>(threadIdx.x) % kThreads % Layout::kChunks;
      const int row = static_cast<int>(threadIdx.x) % kThreads / Layout::kChunks;
      const auto in_tile = [&](std::int64_t key) {
        return static_cast<int>(min(max(key - first, std::int64_t{0}), std::int64_t{kKeys}));
      };
      const int begin = in_tile(view.any.begin);
      const int end = chunk * 8 < dim ? in_tile(view.any.end) : 0;
      const T* from = base + row * source.row_stride + chunk * 8;
      const std::int64_t step = kStepRows * source.row_stride;
#pragma unroll 8
      for (int n = 0; n < kKeys / kStepRows; ++n) {
        const int at = row + n * kStepRows;
        const bool valid = at >= begin && at < end;
        arch::copy_async(tile + Layout::offset(at, chunk), valid ? from : base, valid);
        from += step;
      }
      return;
    }
  }
#pragma unroll 1
  for (int index = static_cast<int>(threadIdx.x) % kThreads; index < kKeys * Layout::kChunks;
       index += kThreads) {
    const int row = index / Layout::kChunks, chunk = index % Layout::kChunks;
    bool valid = view.any.contains(first + row) && chunk * 8 < dim;
    if (view.table != nullptr && valid) valid = view.positions.contains(view.table[first + row]);
    const T* from = valid ? base + row * source.row_stride + chunk * 8 : base;
    arch::copy_async(tile + Layout::offset(row, chunk), from, valid);
  }
}

/// Queues the copy of the row tile's queries, packed rows [first, first + kRows), into a tile. Rows
/// past the sequence's last, and columns past `dim`, become zeros.
template <class T, int kDim, int kRows, int kThreads>
__device__ inline void load_plain_queries(std::uint32_t tile, const AttendParams& p,
                                          const Sequence& sequence, const TileCoord& work) {
  using Layout = SwizzledTile<T, kDim>;
  for (int index = static_cast<int>(threadIdx.x); index < kRows * Layout::kChunks;
       index += kThreads) {
    const int row = index / Layout::kChunks, chunk = index % Layout::kChunks;
    const bool valid = row < work.rows && chunk * 8 < p.head_dim;
    const PackedRow at = packed_row(work, row);
    const T* from = valid ? p.q.at<const T>(sequence.first_row + at.token, at.head) + chunk * 8
                          : static_cast<const T*>(p.q.data);
    arch::copy_async(tile + Layout::offset(row, chunk), from, valid);
  }
}

}  // namespace longspan::kernels::cuda
