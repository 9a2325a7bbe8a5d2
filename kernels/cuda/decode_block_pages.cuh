// Pages in attend_decode_block.cuh. A segment has as many keys as the block has threads: each
// thread looks one key up in the block table, and the places pass to the copies through shared
// memory.
//
// The entry itself comes by cp.async, in the group of a chunk of keys. Under full load a read takes
// as long as the copies that are queued before it; a thread that waited for its entry in a register
// would wait for all of them and drain the ring once a segment. So a lookup runs as many chunks
// ahead as the ring has twice (kPlaceLead segments), and no one ever waits for it alone.
#pragma once

#include "kernels/cuda/arch/copy_word.cuh"
#include "kernels/cuda/loader.cuh"
#include "kernels/cuda/view.cuh"
#include "longspan/order.hpp"

namespace longspan::kernels::cuda::block {

/// Where a key is stored: a page and the row in it.
struct KeyPlace {
  std::int32_t page;  // < 0: nobody sees the key, and neither table nor page is read
  std::int32_t row;
};

/// How many segments before its own a segment's places are looked up in the loop. Its first copy is
/// issued kAhead chunks early, and the group of the lookup is complete kAhead chunks after it.
constexpr int place_lead(int ahead, int chunks) { return (2 * ahead + chunks - 1) / chunks; }

/// This thread's key of a segment: key threadIdx.x. The table is read only for keys that some row
/// sees. Null: it is not. `row` is set in either case.
__device__ inline const std::int32_t* find_entry(const AttendParams& p, const Sequence& sequence,
                                                 const View& view, std::int64_t segment,
                                                 std::int32_t& row) {
  row = 0;
  const std::int64_t key = segment * kSegment + threadIdx.x;
  bool wanted = segment >= 0 && view.any.contains(key);
  if (view.table != nullptr && wanted) wanted = view.positions.contains(view.table[key]);
  if (!wanted) return nullptr;
  const bool narrow = key >> 32 == 0;  // a 32-bit division is a fifth of a 64-bit one
  const unsigned size = static_cast<unsigned>(p.pages.size);
  const std::int64_t column = narrow ? static_cast<unsigned>(key) / size : key / size;
  row = static_cast<std::int32_t>(key - column * size);
  return p.pages.table + sequence.index * p.pages.row_stride + column * p.pages.column_stride;
}

/// The place at once.
__device__ inline KeyPlace find_place(const AttendParams& p, const Sequence& sequence,
                                      const View& view, std::int64_t segment) {
  KeyPlace place;
  const std::int32_t* entry = find_entry(p, sequence, view, segment, place.row);
  place.page = entry == nullptr ? -1 : *entry;
  return place;
}

/// The place with the next group of copies.
__device__ inline void queue_place(KeyPlace* to, const AttendParams& p, const Sequence& sequence,
                                   const View& view, std::int64_t segment) {
  std::int32_t row;
  const std::int32_t* entry = find_entry(p, sequence, view, segment, row);
  to->row = row;
  if (entry == nullptr)
    to->page = -1;
  else
    arch::copy_word_async(&to->page, entry);
}

/// Whether places are looked up ahead for these rows: where cp.async can take them.
template <class Traits>
__device__ inline bool looks_ahead(const AttendParams& p, const KvRows& source) {
  if constexpr (Traits::kPaged) {
    return p.pages && access_of(source, p.pages, 2) == Access::chunks;
  } else {
    return false;
  }
}

/// This thread's 16 bytes of a row: its column in the page that begins at `data`.
template <class Traits>
__device__ inline const typename Traits::Element* place_base(const KvRows& source, int kv_head) {
  using T = typename Traits::Element;
  const int d = static_cast<int>(threadIdx.x) % (Traits::kDim / 8) * 8;
  return static_cast<const T*>(source.data) + kv_head * source.head_stride +
         (source.dense() ? d : source.column(d));
}

/// Queues the copy of kKeys keys of one kv head, whose places are known, into a tile. `base`: see
/// place_base.
template <class Traits>
__device__ inline void load_places(std::uint32_t tile, const KvRows& source, int dim,
                                   const typename Traits::Element* base, const KeyPlace* places) {
  using Layout = Tile<typename Traits::Element, Traits::kDim>;
  constexpr int kStepRows = Traits::kThreads / Layout::kChunks;
  static_assert(Traits::kThreads % Layout::kChunks == 0 && Traits::kKeys % kStepRows == 0);
  const int chunk = static_cast<int>(threadIdx.x) % Layout::kChunks;  // from row to row
  const int first = static_cast<int>(threadIdx.x) / Layout::kChunks;
  const bool column_wanted = chunk * 8 < dim;
  const std::uint64_t page_stride = source.page_stride, row_stride = source.row_stride;
  // All places are read before the first copy: the copies keep their order with other accesses, and
  // each would wait for its own place in turn.
  constexpr int kCount = Traits::kKeys / kStepRows;
  constexpr int kBatch = kCount < 8 ? kCount : 8;
#pragma unroll
  for (int n = 0; n < kCount; n += kBatch) {
    KeyPlace place[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) place[i] = places[first + (n + i) * kStepRows];
    const typename Traits::Element* from[kBatch];  // not read where the page is < 0
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      // Unsigned, as products of 32 by 64 bits are then the cheapest.
      const unsigned page = place[i].page < 0 ? 0u : static_cast<unsigned>(place[i].page);
      const unsigned row = static_cast<unsigned>(place[i].row);
      from[i] = base + (page * page_stride + row * row_stride);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      arch::copy_async(tile + Layout::offset(first + (n + i) * kStepRows, chunk), from[i],
                       place[i].page >= 0 && column_wanted);
  }
}

}  // namespace longspan::kernels::cuda::block
