// Pages in the decode kernel. The loading warp looks up the keys of a segment in the block
// table and passes the places to the copies through shared memory.
//
// Under full load a read takes as long as the copies that are queued before it, so a lookup is
// begun a whole segment before its first copy (decode_loader.cuh): no one ever waits for it.
#pragma once

#include "kernels/cuda/loader.cuh"
#include "kernels/cuda/view.cuh"

namespace longspan::kernels::cuda {

/// Where a key is stored: a page and the row in it.
struct KeyPlace {
  std::int32_t page;  // < 0: nobody sees the key, and neither table nor page is read
  std::int32_t row;
};

/// The place of a segment's key; no table is read for segments < 0, and for keys that no row sees.
__device__ inline KeyPlace find_place(const AttendParams& p, const Sequence& sequence,
                                      const View& view, std::int64_t segment, int key_of_segment) {
  const std::int64_t key = segment * kSegment + key_of_segment;
  bool wanted = segment >= 0 && view.any.contains(key);
  if (view.table != nullptr && wanted) wanted = view.positions.contains(view.table[key]);
  if (!wanted) return {-1, 0};
  const bool narrow = key >> 32 == 0;  // a 32-bit division is a fifth of a 64-bit one
  const unsigned size = static_cast<unsigned>(p.pages.size);
  const std::int64_t column = narrow ? static_cast<unsigned>(key) / size : key / size;
  return {p.pages.table[sequence.index * p.pages.row_stride + column * p.pages.column_stride],
          static_cast<std::int32_t>(key - column * size)};
}

/// Queues the copy of a stage's keys of one kv head, whose places are known, into a tile, 16 bytes
/// at a time. Pages and rows of them are less than 4 GiB apart.
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
  // All places are read before the first copy: the copies keep their order with other accesses, and
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
