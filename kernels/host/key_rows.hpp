// Finds the keys and values of one segment: an address for each row. The code that reads them does
// not depend on whether the cache is contiguous or in pages, and both give the same bits.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/host/tile.hpp"
#include "kernels/host/visible.hpp"
#include "kernels/params.hpp"

namespace longspan::kernels::host {

class KeyRows {
 public:
  /// [key of the segment]: the address of element 0 of its row; null if no row of the tile sees it.
  const std::byte* const* k() const { return k_; }
  const std::byte* const* v() const { return v_; }
  /// Row j of keys that carry their scales (RowFormat), which has an address.
  StoredRow stored(int j) const {
    return {const_cast<std::byte*>(k_[j]), const_cast<std::byte*>(scales_[j])};
  }

  void clear() {
    std::fill_n(k_, kSegment + kRowsAhead, nullptr);
    std::fill_n(v_, kSegment + kRowsAhead, nullptr);
  }

  /// Finds keys [begin, end) of the segment that starts at local key `first`. It reads only the
  /// entries of these keys in the block table.
  void find(const AttendParams& p, const Sequence& s, int kv_head, std::int64_t first, int begin,
            int end) {
    if (begin >= end) return;
    if (p.spans) return find_in_spans(p, s.first_key + first + begin, kv_head, begin, end);
    if (!p.pages) return run(p, 0, s.first_key + first + begin, kv_head, begin, end);
    const std::int32_t* row_of_table = p.pages.table + s.index * p.pages.row_stride;
    std::int64_t column = (first + begin) / p.pages.size, row = (first + begin) % p.pages.size;
    for (int j = begin; j < end; ++column, row = 0) {
      const int next = static_cast<int>(std::min<std::int64_t>(end, j + p.pages.size - row));
      run(p, row_of_table[column * p.pages.column_stride], row, kv_head, j, next);
      j = next;
    }
  }

 private:
  /// Finds keys [begin, end), which are rows `row`, row + 1 ... of one page.
  void run(const AttendParams& p, std::int64_t page, std::int64_t row, int kv_head, int begin,
           int end) {
    place(p, p.k, p.k.data, page, row, kv_head, begin, end, k_);
    place(p, p.v, p.v.data, page, row, kv_head, begin, end, v_);
    place_scales(p, p.k.data, page, row, begin, end);
  }

  /// Finds keys [begin, end), which are rows `row`, row + 1 ... of all sequences.
  void find_in_spans(const AttendParams& p, std::int64_t row, int kv_head, int begin, int end) {
    const KeySpan* const last = p.spans.data + p.spans.count - 1;
    const KeySpan* span =
        std::upper_bound(p.spans.data, last + 1, row,
                         [](std::int64_t r, const KeySpan& s) { return r < s.first; }) -
        1;
    for (int j = begin; j < end; ++span) {
      const int next = span == last
                           ? end
                           : static_cast<int>(std::min<std::int64_t>(end, j + span[1].first - row));
      place(p, p.k, span->k, 0, row - span->first, kv_head, j, next, k_);
      place(p, p.v, span->v, 0, row - span->first, kv_head, j, next, v_);
      place_scales(p, span->k, 0, row - span->first, j, next);
      row += next - j;
      j = next;
    }
  }

  static void place(const AttendParams& p, const KvRows& rows, const void* data, std::int64_t page,
                    std::int64_t row, int kv_head, int begin, int end, const std::byte** to) {
    const StorageFormat format = storage_of(p.kv_dtype);
    const std::int64_t step = format.bytes(rows.row_stride);
    const std::byte* at =
        static_cast<const std::byte*>(data) +
        format.bytes(page * rows.page_stride + row * rows.row_stride + kv_head * rows.head_stride);
    for (int j = begin; j < end; ++j, at += step) to[j] = at;
  }

  void place_scales(const AttendParams& p, const void* data, std::int64_t page, std::int64_t row,
                    int begin, int end) {
    if (!is_latent_row(p.kv_dtype)) return;
    const std::byte* at = static_cast<const std::byte*>(data) + page * p.k.page_stride +
                          p.k.scales_at + row * p.k.scales_stride;
    for (int j = begin; j < end; ++j, at += p.k.scales_stride) scales_[j] = at;
  }

  const std::byte* k_[kSegment + kRowsAhead];
  const std::byte* v_[kSegment + kRowsAhead];
  const std::byte* scales_[kSegment + kRowsAhead];  // where k_ is not null
};

/// Finds the keys `any` of a segment that some row of the tile sees, and `ahead` more.
inline void find_seen(const AttendParams& p, const Tile& tile, const Visible& visible, int kv_head,
                      const Segment& segment, Range any, int ahead, KeyRows& rows) {
  rows.clear();
  const auto find = [&](int begin, int end) {
    rows.find(p, tile.sequence, kv_head, segment.first, begin, end);
  };
  if (visible.listed()) {
    for (int j = any.begin; j < any.end; ++j)
      if (visible.some_row_sees(segment.first + j)) find(j, j + 1);
  } else {
    const std::int64_t end = segment.first + any.end + ahead;
    for (Interval seen = visible.next(segment.first + any.begin); !seen.empty() && seen.begin < end;
         seen = visible.next(seen.end))
      find(static_cast<int>(seen.begin - segment.first),
           static_cast<int>(std::min(seen.end, end) - segment.first));
  }
}

}  // namespace longspan::kernels::host
