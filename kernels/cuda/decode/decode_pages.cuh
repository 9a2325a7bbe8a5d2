// Page lookup in the decode kernel. The scheduler warp looks up the keys of a segment in the block
// table, for the producers.
//
// Under full load a read takes as long as the copies queued before it. Entries of the table are
// therefore also copied into shared memory, some segments ahead, and no warp waits for them.
#pragma once

#include "kernels/cuda/common/loader.cuh"
#include "kernels/cuda/common/view.cuh"
#include "kernels/cuda/decode/decode_bytes.cuh"

namespace longspan::kernels::cuda {

/// The location of a key: its page, and the row in that page.
struct KeyPlace {
  std::int32_t page;  // < 0: no row sees the key, and neither table nor page is read
  std::int32_t row;
};

/// Whether some row sees the local key.
__device__ inline bool is_wanted(const View& view, std::int64_t key) {
  return view.any.contains(key) &&
         (view.table == nullptr || view.positions.contains(view.table[key]));
}

/// Queues the page lookup of a local key that is wanted.
__device__ inline void find_place(KeyPlace& place, const Pages& pages, const Divisor& by_page,
                                  int sequence, std::int64_t key) {
  const bool narrow = key >> 31 == 0;  // almost always; a 64-bit division is slow
  const std::int64_t column = narrow ? static_cast<int>(key) / by_page : key / pages.size;
  place.row = static_cast<std::int32_t>(key - column * pages.size);
  const std::int64_t entry = sequence * pages.row_stride + column * pages.column_stride;
  arch::copy_async<4>(arch::shared_address(&place.page), pages.table + entry, 4);
}

/// Whether keys of pages, of `dim` elements, can be copied from looked-up places, 16 bytes at a
/// time.
template <class Traits>
__device__ inline bool come_by_places(const KvRows& source, const Pages& pages, int dim) {
  constexpr int kBytes = Traits::kFp8 ? 1 : 2;
  if (Traits::kPlain || !pages || ((source.page_stride | source.row_stride) * kBytes) >> 32 != 0)
    return false;
  return Traits::kFp8 ? in_sixteens(source, pages, dim)
                      : access_of(source, pages, 2, dim) == Access::chunks;
}

/// Queues the copy of a stage's keys of one kv head into a tile, 16 bytes at a time, from looked-up
/// places. Pages, and rows of a page, are less than 4 GiB apart.
template <class Traits>
__device__ inline void load_places(std::uint32_t tile, const KvRows& source, int dim, int kv_head,
                                   int thread, const KeyPlace* places) {
  using Layout = typename Traits::Layout;
  constexpr int kStep = Traits::kStepRows;
  const int chunk = thread % Traits::kLanes;  // from row to row
  const int first = thread / Traits::kLanes;
  static_assert(Traits::kLanes == Layout::kChunks);
  constexpr int kSize = Traits::kRowBytes / Traits::kDim, kEach = 16 / kSize;
  const int bytes = max(0, min(16, (dim - chunk * kEach) * kSize));
  const std::int64_t column = source.dense() ? chunk * kEach : source.column(chunk * kEach);
  const std::uint8_t* base = static_cast<const std::uint8_t*>(source.data) +
                             (kv_head * source.head_stride + column) * kSize;
  const auto page_stride = static_cast<std::uint32_t>(source.page_stride * kSize);
  const auto row_stride = static_cast<std::uint32_t>(source.row_stride * kSize);
  // Rows eight apart are permuted alike, so their offsets differ by a constant.
  constexpr int kAlike = kStep < 8 ? 8 / kStep : 1;
  std::uint32_t to[kAlike];
#pragma unroll
  for (int i = 0; i < kAlike; ++i)
    to[i] = tile + static_cast<std::uint32_t>(Layout::offset(first + i * kStep, chunk));
  // All places are read before the first copy: copies keep their order with other accesses, and
  // each would wait for its own place in turn.
  constexpr int kCount = Traits::kStageKeys / kStep;
  constexpr int kBatch = kCount < 8 ? kCount : 8;
#pragma unroll
  for (int n = 0; n < kCount; n += kBatch) {
    KeyPlace place[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) place[i] = places[first + (n + i) * kStep];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int step = n + i;
      const auto page = static_cast<std::uint32_t>(place[i].page);  // < 0: not read
      const std::uint8_t* from =
          base + std::uint64_t{page} * page_stride +
          std::uint64_t{static_cast<std::uint32_t>(place[i].row)} * row_stride;
      arch::copy_async<16>(to[step % kAlike] + static_cast<std::uint32_t>(Layout::offset(
                                                   step / kAlike * kAlike * kStep, 0)),
                           place[i].page >= 0 ? from : base, place[i].page >= 0 ? bytes : 0);
    }
  }
}

}  // namespace longspan::kernels::cuda
