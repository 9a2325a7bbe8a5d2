// Loads fp8 keys and values, unconverted, into a stage of the decode kernel from caches of any
// layout. It is used if TMA cannot load them, or if some keys of a stage are not wanted. The
// methods are those of loader.cuh, which tells when each of them applies.
#pragma once

#include "kernels/cuda/common/loader.cuh"
#include "kernels/cuda/common/view.cuh"

namespace longspan::kernels::cuda {

/// Whether the rows of a cache, of `dim` elements, can be copied 16 bytes at a time.
__device__ inline bool in_sixteens(const KvRows& source, const Pages& pages, int dim) {
  const std::int64_t row = pages && pages.size == 1 ? 0 : source.row_stride;
  const std::int64_t strides = source.head_stride | row | (pages ? source.page_stride : 0);
  const bool columns = source.dense() || (source.dim_stride == 1 && source.chunk % 16 == 0 &&
                                          source.chunk_stride % 16 == 0);
  return columns && dim % 8 == 0 && strides % 16 == 0 &&
         reinterpret_cast<std::uintptr_t>(source.data) % 16 == 0;
}

/// Copies kBytes (8 or 16) at a time by cp.async. A dim that ends inside of 16 bytes ends at 8.
template <class Traits, int kBytes>
__device__ inline void copy_bytes(std::uint32_t tile, const KvRows& source, const AttendParams& p,
                                  int kv_head, const Sequence& sequence, const Wanted& wanted,
                                  int thread) {
  using Layout = typename Traits::Layout;
  constexpr int kUnits = Traits::kRowBytes / kBytes;
  constexpr int kCount = Traits::kStageKeys * kUnits / Traits::kLoaders;
  constexpr int kBatch = kCount < 4 ? kCount : 4;
  static_assert(Traits::kStageKeys * kUnits % Traits::kLoaders == 0 && kCount % kBatch == 0);
  const std::uint8_t* data = static_cast<const std::uint8_t*>(source.data);
#pragma unroll 1
  for (int n = 0; n < kCount; n += kBatch) {
    std::int64_t offset[kBatch];  // < 0: the bytes become zeros
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int index = (n + i) * Traits::kLoaders + thread;
      const int row = index / kUnits, d = index % kUnits * kBytes;
      offset[i] = d < p.head_dim && wanted(row)
                      ? KeyWalk(p, source, sequence, kv_head, wanted.first + row, 1).offset() +
                            (source.dense() ? d : source.column(d))
                      : std::int64_t{-1};
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int index = (n + i) * Traits::kLoaders + thread;
      const int row = index / kUnits, d = index % kUnits * kBytes;
      arch::copy_async<kBytes>(tile + Layout::offset(row, d / 16) + d % 16,
                               data + max(offset[i], std::int64_t{0}),
                               offset[i] < 0 ? 0 : min(kBytes, p.head_dim - d));
    }
  }
}

/// Loads keys that are adjacent in eights: four columns at a time, transposed in registers.
template <class Traits>
__device__ inline void transpose_bytes(std::uint32_t tile, const KvRows& source,
                                       const AttendParams& p, int kv_head, const Sequence& sequence,
                                       const Wanted& wanted, int thread) {
  using Layout = typename Traits::Layout;
  constexpr int kFours = Traits::kDim / 4;
  const std::uint8_t* data = static_cast<const std::uint8_t*>(source.data);
#pragma unroll 1
  for (int index = thread; index < Traits::kStageKeys / 8 * kFours; index += Traits::kLoaders) {
    const int row = index / kFours * 8, d = index % kFours * 4;
    unsigned seen = 0;  // bit j: key row + j is wanted
    if (d < p.head_dim)
#pragma unroll
      for (int j = 0; j < 8; ++j) seen |= wanted(row + j) ? 1u << j : 0u;
    uint2 column[4] = {};
    if (seen != 0) {
      // The eight are in one page: `first` and page sizes are multiples of eight.
      const std::int64_t offset =
          KeyWalk(p, source, sequence, kv_head, wanted.first + row, 1).offset();
#pragma unroll
      for (int i = 0; i < 4; ++i)
        column[i] = *reinterpret_cast<const uint2*>(data + offset + source.column(d + i));
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const auto of = [&](const uint2& eight) { return j < 4 ? eight.x : eight.y; };
      const unsigned pick = static_cast<unsigned>(j % 4 | (j % 4 + 4) << 4);
      const unsigned low = __byte_perm(of(column[0]), of(column[1]), pick) & 0xffff;
      const unsigned high = __byte_perm(of(column[2]), of(column[3]), pick) << 16;
      arch::store_shared(tile + Layout::offset(row + j, d / 16) + d % 16,
                         seen >> j & 1 ? low | high : 0u);
    }
  }
}

/// Loads keys of any other layout, byte by byte.
template <class Traits>
__device__ inline void gather_bytes(std::uint32_t tile, const KvRows& source, const AttendParams& p,
                                    int kv_head, const Sequence& sequence, const Wanted& wanted,
                                    int thread) {
  using Layout = typename Traits::Layout;
  constexpr int kFours = Traits::kDim / 4;
  const std::uint8_t* data = static_cast<const std::uint8_t*>(source.data);
#pragma unroll 1
  for (int index = thread; index < Traits::kStageKeys * kFours; index += Traits::kLoaders) {
    const int row = index / kFours, d = index % kFours * 4;
    std::uint32_t four = 0;
    if (d < p.head_dim && wanted(row)) {
      const std::int64_t offset =
          KeyWalk(p, source, sequence, kv_head, wanted.first + row, 1).offset();
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (d + i < p.head_dim)
          four |= static_cast<std::uint32_t>(data[offset + source.column(d + i)]) << i * 8;
    }
    arch::store_shared(tile + Layout::offset(row, d / 16) + d % 16, four);
  }
}

/// Loads a stage's keys of one kv head, from local key `first` on, with the producer warps. Keys
/// that no row of the row tile may see are not read, nor are their page table entries. They, and
/// columns past p.head_dim, become zeros.
template <class Traits>
__device__ inline void load_bytes(std::uint32_t tile, const KvRows& source, const AttendParams& p,
                                  int kv_head, const Sequence& sequence, const View& view,
                                  std::int64_t first, int thread) {
  const Wanted wanted{view, first};
  if (in_sixteens(source, p.pages, p.head_dim))
    return copy_bytes<Traits, 16>(tile, source, p, kv_head, sequence, wanted, thread);
  const Access access = access_of(source, p.pages, 1, p.head_dim);
  if (access == Access::chunks)
    copy_bytes<Traits, 8>(tile, source, p, kv_head, sequence, wanted, thread);
  else if (access == Access::keys)
    transpose_bytes<Traits>(tile, source, p, kv_head, sequence, wanted, thread);
  else
    gather_bytes<Traits>(tile, source, p, kv_head, sequence, wanted, thread);
}

}  // namespace longspan::kernels::cuda
