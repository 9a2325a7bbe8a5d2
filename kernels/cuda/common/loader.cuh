// Loads keys, values and queries into tiles, whatever their layout and type. `plain` is the fast
// path, which nothing else may slow down. The other two loaders decide at run time, by branches
// that are uniform over the block:
//
//     chunks    eight elements of a row lie together: 16-bit ones by cp.async, fp8 by registers
//     keys      eight keys lie together (V in [pages, kv_heads, dim, page]): they are transposed in
//               registers
//     elements  anything else is loaded one by one
//
// fp8 becomes T while it is loaded, exactly: both of its types are subsets of fp16 and of bf16.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/arch/target.cuh"
#include "kernels/cuda/common/access.hpp"
#include "kernels/cuda/common/tile.cuh"
#include "kernels/cuda/dispatch/attend.hpp"

namespace longspan::kernels::cuda {

// ---- fp8 ------------------------------------------------------------------------------------

/// Converts two fp8 numbers, the first of them in the low byte, to two of T.
template <class T>
__device__ inline std::uint32_t widen_two(std::uint32_t two, bool e5m2) {
  std::uint32_t halves;
  if constexpr (arch::kTarget >= 890) {
    const __half2_raw raw = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two),
                                                       e5m2 ? __NV_E5M2 : __NV_E4M3);
    halves = static_cast<std::uint32_t>(raw.x) | static_cast<std::uint32_t>(raw.y) << 16;
  } else {
    halves = __byte_perm(two, 0, 0x1404);  // e5m2: the upper byte of a half
    if (!e5m2) {
      const std::uint32_t sign = halves & 0x80008000u, magnitude = halves >> 1 & 0x3f803f80u;
      const __half2_raw raw{static_cast<unsigned short>(magnitude),
                            static_cast<unsigned short>(magnitude >> 16)};
      const __half2_raw scaled =
          __hmul2(__half2(raw), __half2half2(__ushort_as_half(0x5c00)));  // 256
      halves = sign | static_cast<std::uint32_t>(scaled.x) |
               static_cast<std::uint32_t>(scaled.y) << 16 |
               __vcmpeq2(magnitude, 0x3f803f80u);  // NaN
    }
  }
  if constexpr (std::is_same_v<T, __half>) {
    return halves;
  } else {
    const __half2_raw pair{static_cast<unsigned short>(halves),
                           static_cast<unsigned short>(halves >> 16)};
    const float2 wide = __half22float2(pair);
    return arch::pack<T>(wide.x, wide.y);
  }
}

template <class T>
__device__ inline uint4 widen_eight(uint2 eight, bool e5m2) {
  return make_uint4(widen_two<T>(eight.x & 0xffff, e5m2), widen_two<T>(eight.x >> 16, e5m2),
                    widen_two<T>(eight.y & 0xffff, e5m2), widen_two<T>(eight.y >> 16, e5m2));
}

// ---- locations -----------------------------------------------------------------------------

/// Walks over the rows of keys that are `step` apart, and returns the offset of each in k or v, in
/// elements, without a division for each. It reads the block table only when a row is requested.
class KeyWalk {
 public:
  __device__ KeyWalk(const AttendParams& p, const KvRows& source, const Sequence& sequence,
                     int kv_head, std::int64_t local_key, int step)
      : source_(source), pages_(p.pages), head_(kv_head * source.head_stride) {
    if (!pages_) {
      page_row_ = 0;
      row_ = sequence.first_key + local_key;
      row_step_ = step;
      return;
    }
    const unsigned size = static_cast<unsigned>(pages_.size);
    const std::uint64_t key = static_cast<std::uint64_t>(local_key);
    row_ =
        static_cast<std::int64_t>(key >> 32 == 0 ? static_cast<unsigned>(key) / size : key / size);
    page_row_ = static_cast<int>(local_key - row_ * pages_.size);
    row_step_ = static_cast<int>(static_cast<unsigned>(step) / size);
    page_row_step_ = step - row_step_ * pages_.size;
    table_ = pages_.table + sequence.index * pages_.row_stride;
  }

  __device__ std::int64_t offset() const {
    if (!pages_) return head_ + row_ * source_.row_stride;
    return head_ + table_[row_ * pages_.column_stride] * source_.page_stride +
           page_row_ * source_.row_stride;
  }
  __device__ void step() {
    row_ += row_step_;
    if (!pages_) return;
    page_row_ += page_row_step_;
    if (page_row_ >= pages_.size) {
      page_row_ -= pages_.size;
      ++row_;
    }
  }

 private:
  const KvRows& source_;
  const Pages& pages_;
  const std::int32_t* table_ = nullptr;
  std::int64_t head_;
  std::int64_t row_;  // column of the table; without pages the key itself
  int page_row_, row_step_, page_row_step_ = 0;
};

/// Which keys of a tile some row may see.
struct Wanted {
  const View& view;
  std::int64_t first;

  __device__ bool operator()(int row) const {
    return view.any.contains(first + row) &&
           (view.table == nullptr || view.positions.contains(view.table[first + row]));
  }
  /// Whether this is the common tile, of which all `count` keys are wanted.
  __device__ bool all(int count) const {
    return view.table == nullptr && first >= view.any.begin && first + count <= view.any.end;
  }
};

// ---- the three loaders ----------------------------------------------------------------------

template <class T, int kDim, int kKeys, int kThreads, bool k8, int kPanelRows>
__device__ inline void load_chunks(std::uint32_t tile, const KvRows& source, int dim,
                                   const AttendParams& p, int kv_head, const Sequence& sequence,
                                   const Wanted& wanted) {
  using Layout = SwizzledTile<T, kDim, kPanelRows>;
  constexpr int kLanes = Layout::kChunks <= 4    ? 4
                         : Layout::kChunks <= 8  ? 8
                         : Layout::kChunks <= 16 ? 16
                                                 : 32;
  constexpr int kStep = kThreads / kLanes, kCount = kKeys / kStep;
  constexpr int kBatch = kCount < 8 ? kCount : 8;  // rows whose addresses are in registers
  static_assert(kKeys % kStep == 0 && kCount % kBatch == 0);
  const int thread = static_cast<int>(threadIdx.x) % kThreads;
  const int chunk = thread % kLanes;
  const int row = thread / kLanes;
  if (chunk >= Layout::kChunks) return;
  const bool column_wanted = chunk * 8 < dim;
  const std::int64_t column = source.dense() ? chunk * 8 : source.column(chunk * 8);
  const bool e5m2 = p.kv_dtype == DType::e5m2;
  const bool all = wanted.all(kKeys);
  KeyWalk walk(p, source, sequence, kv_head, wanted.first + row, kStep);
#pragma unroll
  for (int n = 0; n < kCount; n += kBatch) {
    std::int64_t offset[kBatch];  // < 0: the row is zeros
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      offset[i] = column_wanted && (all || wanted(row + (n + i) * kStep)) ? walk.offset() + column
                                                                          : std::int64_t{-1};
      walk.step();
    }
    if constexpr (!k8) {
      const T* data = static_cast<const T*>(source.data);
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        arch::copy_async(tile + Layout::offset(row + (n + i) * kStep, chunk),
                         offset[i] < 0 ? data : data + offset[i], offset[i] >= 0);
    } else {
      const std::uint8_t* data = static_cast<const std::uint8_t*>(source.data);
      uint2 eight[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        eight[i] =
            offset[i] < 0 ? make_uint2(0, 0) : *reinterpret_cast<const uint2*>(data + offset[i]);
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        arch::store_shared(tile + Layout::offset(row + (n + i) * kStep, chunk),
                           widen_eight<T>(eight[i], e5m2));
    }
  }
}

/// A thread takes eight keys and two columns at a time. A warp takes two groups of keys and 16
/// pairs of columns, which are whole sectors of memory and nearly all banks.
template <class T, int kDim, int kKeys, int kThreads, bool k8, int kPanelRows>
__device__ inline void load_transposed(std::uint32_t tile, const KvRows& source, int dim,
                                       const AttendParams& p, int kv_head, const Sequence& sequence,
                                       const Wanted& wanted) {
  using Layout = SwizzledTile<T, kDim, kPanelRows>;
  const bool e5m2 = p.kv_dtype == DType::e5m2;
#pragma unroll 1
  for (int index = static_cast<int>(threadIdx.x) % kThreads; index < kKeys / 8 * (kDim / 2);
       index += kThreads) {
    const int row = (index / kDim * 2 + index % 2) * 8, d = index / 2 % (kDim / 2) * 2;
    unsigned seen = 0;  // bit j: key row + j is wanted
    if (d < dim)
#pragma unroll
      for (int j = 0; j < 8; ++j) seen |= wanted(row + j) ? 1u << j : 0u;
    std::uint32_t a[4] = {}, b[4] = {};  // columns d and d + 1 of the eight keys
    if (seen != 0) {
      // The eight are in one page: `first` and page sizes are multiples of eight.
      const std::int64_t offset =
          KeyWalk(p, source, sequence, kv_head, wanted.first + row, 1).offset();
      const std::int64_t columns[2] = {offset + source.column(d), offset + source.column(d + 1)};
      if constexpr (k8) {
        const std::uint8_t* data = static_cast<const std::uint8_t*>(source.data);
        const uint2 low = *reinterpret_cast<const uint2*>(data + columns[0]);
        const uint2 high = *reinterpret_cast<const uint2*>(data + columns[1]);
        a[0] = low.x, a[1] = low.y, b[0] = high.x, b[1] = high.y;
      } else {
        const T* data = static_cast<const T*>(source.data);
        const uint4 low = *reinterpret_cast<const uint4*>(data + columns[0]);
        const uint4 high = *reinterpret_cast<const uint4*>(data + columns[1]);
        a[0] = low.x, a[1] = low.y, a[2] = low.z, a[3] = low.w;
        b[0] = high.x, b[1] = high.y, b[2] = high.z, b[3] = high.w;
      }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      std::uint32_t pair;
      if constexpr (k8)
        pair =
            widen_two<T>(__byte_perm(a[j / 4], b[j / 4], j % 4 | (j % 4 + 4) << 4) & 0xffff, e5m2);
      else
        pair = __byte_perm(a[j / 2], b[j / 2], j % 2 == 0 ? 0x5410 : 0x7632);
      arch::store_shared(tile + Layout::offset(row + j, d / 8) + d % 8 * 2,
                         seen >> j & 1 ? pair : 0u);
    }
  }
}

/// Gathers eight elements of T or fp8, at `at(i)` from `data`, as T; those from `count` on are
/// zeros and not read.
template <class T, bool k8, class At>
__device__ inline uint4 gather_eight(const void* data, bool e5m2, int count, const At& at) {
  using Bits = std::conditional_t<k8, std::uint8_t, std::uint16_t>;
  const auto bits = [&](int i) {
    return i < count ? std::uint32_t{static_cast<const Bits*>(data)[at(i)]} : 0u;
  };
  std::uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (k8)
      words[i] = widen_two<T>(bits(2 * i) | bits(2 * i + 1) << 8, e5m2);
    else
      words[i] = bits(2 * i) | bits(2 * i + 1) << 16;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

template <class T, int kDim, int kKeys, int kThreads, bool k8, int kPanelRows>
__device__ inline void load_elements(std::uint32_t tile, const KvRows& source, int dim,
                                     const AttendParams& p, int kv_head, const Sequence& sequence,
                                     const Wanted& wanted) {
  using Layout = SwizzledTile<T, kDim, kPanelRows>;
#pragma unroll 1
  for (int index = static_cast<int>(threadIdx.x) % kThreads; index < kKeys * Layout::kChunks;
       index += kThreads) {
    const int row = index / Layout::kChunks, chunk = index % Layout::kChunks;
    uint4 eight = make_uint4(0, 0, 0, 0);
    if (chunk * 8 < dim && wanted(row)) {
      const std::int64_t offset =
          KeyWalk(p, source, sequence, kv_head, wanted.first + row, 1).offset();
      eight = gather_eight<T, k8>(source.data, p.kv_dtype == DType::e5m2, dim - chunk * 8,
                                  [&](int i) { return offset + source.column(chunk * 8 + i); });
    }
    arch::store_shared(tile + Layout::offset(row, chunk), eight);
  }
}

template <class T, int kDim, int kRows, int kThreads>
__device__ inline void load_any_queries(std::uint32_t tile, const AttendParams& p,
                                        const Sequence& sequence, const TileCoord& work) {
  using Layout = SwizzledTile<T, kDim>;
  const bool is_16 = p.q_dtype == p.dtype;
  const bool together = aligned_to_eight(
      p.q.data, is_16 ? 2 : 1, p.q.row_stride | p.q.head_stride | p.q.gap.elements | p.head_dim);
  if (is_16 && together) {
    load_plain_queries<T, kDim, kRows, kThreads>(tile, p, sequence, work);
    return;
  }
#pragma unroll 1
  for (int index = static_cast<int>(threadIdx.x); index < kRows * Layout::kChunks;
       index += kThreads) {
    const int row = index / Layout::kChunks, chunk = index % Layout::kChunks;
    uint4 eight = make_uint4(0, 0, 0, 0);
    if (row < work.rows && chunk * 8 < p.head_dim) {
      const PackedRow at = packed_row(work, row);
      const std::int64_t offset = p.q.offset(sequence.first_row + at.token, at.head) + chunk * 8;
      const bool e5m2 = p.q_dtype == DType::e5m2;
      const int count = p.head_dim - chunk * 8;
      const auto at_element = [&](int i) { return offset + i; };
      if (is_16)
        eight = gather_eight<T, false>(p.q.data, e5m2, count, at_element);
      else if (together)
        eight = widen_eight<T>(
            *reinterpret_cast<const uint2*>(p.q.at<const std::uint8_t>(0, 0) + offset), e5m2);
      else
        eight = gather_eight<T, true>(p.q.data, e5m2, count, at_element);
    }
    arch::store_shared(tile + Layout::offset(row, chunk), eight);
  }
}

// ---- what kernels call ----------------------------------------------------------------------

/// Loads kKeys keys of one kv head, from local key `first` on (a multiple of 8), into a tile of T.
/// Keys that no row of the row tile may see are not read, nor are their page table entries. They,
/// and columns past `dim`, become zeros. The tile is complete after the next commit_copies,
/// wait_copies and __syncthreads.
template <class T, int kDim, int kKeys, int kThreads, Loader kLoader, int kPanelRows = 0>
__device__ inline void load_keys(std::uint32_t tile, const KvRows& source, int dim,
                                 const AttendParams& p, int kv_head, const Sequence& sequence,
                                 const View& view, std::int64_t first) {
  if constexpr (kLoader == Loader::plain) {
    load_plain<T, kDim, kKeys, kThreads, kPanelRows>(tile, source, dim, kv_head, sequence, view,
                                                     first);
  } else {
    constexpr bool k8 = kLoader == Loader::any8;
    const Wanted wanted{view, first};
    const Access access = access_of(source, p.pages, k8 ? 1 : 2, dim);
    if (access == Access::chunks)
      load_chunks<T, kDim, kKeys, kThreads, k8, kPanelRows>(tile, source, dim, p, kv_head, sequence,
                                                            wanted);
    else if (access == Access::keys)
      load_transposed<T, kDim, kKeys, kThreads, k8, kPanelRows>(tile, source, dim, p, kv_head,
                                                                sequence, wanted);
    else
      load_elements<T, kDim, kKeys, kThreads, k8, kPanelRows>(tile, source, dim, p, kv_head,
                                                              sequence, wanted);
  }
}

/// Loads the row tile's queries, packed rows [first, first + kRows), into a tile of T. Rows past
/// the sequence's last, and columns past p.head_dim, become zeros. The tile is complete as
/// described at load_keys.
template <class T, int kDim, int kRows, int kThreads, Loader kLoader>
__device__ inline void load_queries(std::uint32_t tile, const AttendParams& p,
                                    const Sequence& sequence, const TileCoord& work) {
  if constexpr (kLoader == Loader::plain) {
    load_plain_queries<T, kDim, kRows, kThreads>(tile, p, sequence, work);
  } else {
    load_any_queries<T, kDim, kRows, kThreads>(tile, p, sequence, work);
  }
}

}  // namespace longspan::kernels::cuda
