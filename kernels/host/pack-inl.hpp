// Packs keys, values and queries of a tile into the layout that multiply reads: dense fp32, in
// panels of 64 columns. The rows of a panel are contiguous, whatever the strides of the source.
//
//     keys     [panel of 64 keys][head_dim][64]   transposed
//     values   [panel of 64 columns][128 keys][64]
//     queries  [rows][head_dim], times the score's factor
#include "kernels/host/targets.hpp"

#if defined(LONGSPAN_HOST_PACK_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef LONGSPAN_HOST_PACK_INL
#undef LONGSPAN_HOST_PACK_INL
#else
#define LONGSPAN_HOST_PACK_INL
#endif

#include <algorithm>
#include <cstddef>

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "kernels/host/key_rows.hpp"
#include "kernels/host/simd-inl.hpp"
#include "kernels/host/tile.hpp"
#include "kernels/params.hpp"
#include "longspan/limits.hpp"

HWY_BEFORE_NAMESPACE();
namespace longspan::kernels::host {
namespace HWY_NAMESPACE {

/// Prefetches a row. Rows are a stride or a page apart, so the hardware does not predict the next
/// ones; with few queries these loads determine the time.
template <class T>
HWY_INLINE void prefetch_row(const std::byte* row, int dim) {
  constexpr int kLine = 64;
  if (row == nullptr) return;
  const int bytes = dim * static_cast<int>(sizeof(T));
  for (int at = 0; at < bytes; at += kLine) hwy::Prefetch(row + at);
}

/// Lines of memory that are prefetched a few at a time, beside other work: many at once would fill
/// the line buffers and make loads wait.
class LinesAhead {
 public:
  LinesAhead() = default;
  LinesAhead(const std::byte* data, std::int64_t bytes) : at_(data), end_(data + bytes) {}

  std::int64_t count() const { return (end_ - at_ + kLine - 1) / kLine; }
  HWY_INLINE void next(std::int64_t lines) {
    for (const std::byte* const stop = std::min(end_, at_ + lines * kLine); at_ < stop;
         at_ += kLine)
      hwy::Prefetch(at_);
  }

 private:
  static constexpr std::int64_t kLine = 64;

  const std::byte *at_ = nullptr, *end_ = nullptr;
};

#if HWY_TARGET != HWY_SCALAR
/// Stores block b of four lanes to row 4 b.
template <class D>
HWY_INLINE void store_blocks(D d, hn::Vec<D> v, float* to) {
  if constexpr (hn::MaxLanes(d) > 4) {
    const hn::Half<D> half;
    store_blocks(half, hn::LowerHalf(half, v), to);
    store_blocks(half, hn::UpperHalf(half, v), to + hn::MaxLanes(half) * kPanel);
  } else {
    hn::StoreU(v, d, to);
  }
}

/// Transposes as many columns of four rows as d has lanes.
template <class D, class T>
HWY_INLINE void transpose_lanes(D d, const T* const rows[4], int c, float* HWY_RESTRICT to) {
  const hn::Repartition<std::uint64_t, D> pairs;
  const auto a0 = load(d, rows[0] + c), a1 = load(d, rows[1] + c);
  const auto a2 = load(d, rows[2] + c), a3 = load(d, rows[3] + c);
  const auto low01 = hn::BitCast(pairs, hn::InterleaveLower(d, a0, a1));
  const auto high01 = hn::BitCast(pairs, hn::InterleaveUpper(d, a0, a1));
  const auto low23 = hn::BitCast(pairs, hn::InterleaveLower(d, a2, a3));
  const auto high23 = hn::BitCast(pairs, hn::InterleaveUpper(d, a2, a3));
  store_blocks(d, hn::BitCast(d, hn::InterleaveLower(pairs, low01, low23)), to);
  store_blocks(d, hn::BitCast(d, hn::InterleaveUpper(pairs, low01, low23)), to + kPanel);
  store_blocks(d, hn::BitCast(d, hn::InterleaveLower(pairs, high01, high23)), to + 2 * kPanel);
  store_blocks(d, hn::BitCast(d, hn::InterleaveUpper(pairs, high01, high23)), to + 3 * kPanel);
}
#endif

/// Element c of a row.
template <class T>
HWY_INLINE float load_one(const T* row, int c) {
  return hn::GetLane(load(hn::CappedTag<float, 1>(), row + c));
}

/// to[c * kPanel + i] = rows[i][c] for c in [0, n), i in [0, 4).
template <class T>
HWY_INLINE void transpose_four(const T* const rows[4], int n, float* HWY_RESTRICT to) {
  int c = 0;
#if HWY_TARGET != HWY_SCALAR
  for (; c + kLanes <= n; c += kLanes) transpose_lanes(Lanes(), rows, c, to + c * kPanel);
  for (; c + kLanes8 <= n; c += kLanes8) transpose_lanes(Lanes8(), rows, c, to + c * kPanel);
  for (; c + 4 <= n; c += 4) transpose_lanes(hn::CappedTag<float, 4>(), rows, c, to + c * kPanel);
#endif
  for (; c < n; ++c)
    for (int i = 0; i < 4; ++i) to[c * kPanel + i] = load_one(rows[i], c);
}

/// Prefetches a row whose chunks lie apart: the line in which each chunk begins, which also holds
/// those of the next keys.
template <class T>
HWY_INLINE void prefetch_chunks(const std::byte* row, int chunks, std::int64_t stride) {
  if (row == nullptr) return;
  for (int i = 0; i < chunks; ++i) hwy::Prefetch(row + i * stride * static_cast<int>(sizeof(T)));
}

/// Converts n dense elements to fp32.
template <class T>
HWY_INLINE void widen(const T* from, int n, float* to) {
  const Lanes d;
  const Lanes8 d8;
  const hn::CappedTag<float, 4> d4;
  int c = 0;
  for (; c + kLanes <= n; c += kLanes) hn::StoreU(load(d, from + c), d, to + c);
  for (; c + kLanes8 <= n; c += kLanes8) hn::StoreU(load(d8, from + c), d8, to + c);
  constexpr int kFew = hn::MaxLanes(d4);
  for (; c + kFew <= n; c += kFew) hn::StoreU(load(d4, from + c), d4, to + c);
  for (; c < n; ++c) to[c] = load_one(from, c);
}

/// Converts elements [begin, end) of a row of any chunks to fp32; begin is a multiple of kPanel.
template <class T>
HWY_INLINE void widen_row(const KvRows& layout, const T* row, int begin, int end, float* to) {
  if (layout.dense()) return widen(row + begin, end - begin, to);
  if (layout.dim_stride == 1 && layout.chunk % 4 == 0 && kPanel % layout.chunk == 0) {
    const T* from = row + layout.column(begin);
    for (int c = begin; c < end; c += layout.chunk, from += layout.chunk_stride)
      widen(from, std::min(layout.chunk, end - c), to + c - begin);
    return;
  }
  for (int c = begin; c < end; ++c) to[c - begin] = load_one(row + layout.column(c), 0);
}

/// Packs keys [begin, end) of a segment, from the addresses of their rows. `keys` is aligned to 16;
/// missing rows give zeros.
template <class T>
void pack_keys(const KvRows& layout, const std::byte* const* rows, Range keys, int dim,
               float* panels) {
  static constexpr T zeros[kMaxHeadDim] = {};
  const bool dense = layout.dense();
  const bool in_fours = dense || (layout.dim_stride == 1 && layout.chunk % 4 == 0);
  const int chunk = dense ? dim : layout.chunk;
  for (int key = keys.begin; key < keys.end; key += 4) {
    float* to = panels + key / kPanel * dim * kPanel + key % kPanel;
    const T* four[4];
    for (int i = 0; i < 4; ++i) {
      four[i] = rows[key + i] ? reinterpret_cast<const T*>(rows[key + i]) : zeros;
      if (dense) prefetch_row<T>(rows[key + i + kRowsAhead], dim);
    }
    if (in_fours) {
      if (!dense) prefetch_chunks<T>(rows[key + kRowsAhead], dim / chunk, layout.chunk_stride);
      for (int c = 0; c < dim; c += chunk) {
        transpose_four(four, std::min(chunk, dim - c), to + c * kPanel);
        for (int i = 0; i < 4; ++i)
          if (four[i] != zeros) four[i] += layout.chunk_stride;
      }
    } else {
      HWY_ALIGN float wide[4][kMaxHeadDim] = {};
      const float* wide_four[4] = {wide[0], wide[1], wide[2], wide[3]};
      for (int i = 0; i < 4; ++i)
        if (four[i] != zeros) widen_row(layout, four[i], 0, dim, wide[i]);
      transpose_four(wide_four, dim, to);
    }
  }
}

/// Packs values whose keys are adjacent in memory, [dim][keys], reading along the keys: keys
/// [begin, end), whose first is at `row`.
template <class T>
HWY_INLINE void pack_across(const KvRows& layout, const T* row, int begin, int end, int dim,
                            float* panels) {
  const int fours = (end - begin) / 4 * 4;
  std::int64_t at = 0;
  int in_chunk = 0;
  for (int c = 0; c < dim; c += 4) {
    float* to = panels + (c / kPanel * kSegment + begin) * kPanel + c % kPanel;
    const T* columns[4];
    for (int i = 0; i < 4; ++i) {
      columns[i] = row + at;
      if (c + i + 1 >= dim) continue;  // the last column again, in place of which pad_row writes
      at += layout.dim_stride;
      if (++in_chunk < layout.chunk) continue;
      at += layout.chunk_stride - layout.chunk * layout.dim_stride;
      in_chunk = 0;
    }
    transpose_four(columns, fours, to);
    for (int j = fours; j < end - begin; ++j)
      for (int i = 0; i < 4; ++i) to[j * kPanel + i] = load_one(columns[i], j);
  }
}

/// Writes zeros from `columns` on to the next multiple of 16.
HWY_INLINE void pad_row(int columns, float* to) {
  std::fill(to + columns, to + TileSpace::padded(columns), 0.0f);
}

/// Packs values of keys [begin, end); missing rows give zeros.
template <class T>
void pack_values(const KvRows& layout, const std::byte* const* rows, Range keys, int dim,
                 float* panels) {
  const bool across = !layout.dense() && layout.row_stride == 1;
  const int last = (dim - 1) / kPanel * kPanel;  // first column of the last panel
  for (int key = keys.begin; key < keys.end;) {
    int next = key + 1;
    const T* from = reinterpret_cast<const T*>(rows[key]);
    if (from != nullptr && across) {
      while (next < keys.end && rows[next] == rows[key] + (next - key) * sizeof(T)) ++next;
      if ((next - key) * sizeof(T) <= 64 && next - key >= 8)
        prefetch_chunks<T>(rows[next], dim, layout.dim_stride);
      pack_across(layout, from, key, next, dim, panels);
    } else {
      if (layout.dense()) prefetch_row<T>(rows[key + kRowsAhead], dim);
      for (int panel = 0; panel < dim; panel += kPanel) {
        float* to = panels + (panel / kPanel * kSegment + key) * kPanel;
        const int columns = std::min(kPanel, dim - panel);
        if (from == nullptr)
          std::fill_n(to, columns, 0.0f);
        else
          widen_row(layout, from, panel, panel + columns, to);
      }
    }
    for (int j = key; j < next; ++j)
      pad_row(dim - last, panels + (last / kPanel * kSegment + j) * kPanel);
    key = next;
  }
}

/// Numbers [begin, end) of a row that carries its scales, as fp32.
inline void widen_stored(const StoredRow& row, const RowFormat& format, int begin, int end,
                         float* to) {
  const Lanes d;
  float* const first = to;
  for (int c = begin; c < std::min(end, format.coded);) {
    const int group = c / format.group;
    const int count = std::min({end, format.coded, (group + 1) * format.group}) - c;
    if (format.code == Code::fp8)
      widen(reinterpret_cast<const E4m3*>(row.data) + c, count, to);
    else
      for (int i = 0; i < count; ++i) to[i] = load_code(row, format, c + i);
    const float scale = load_scale(row, format, group);
    int i = 0;
    for (; i + kLanes <= count; i += kLanes)
      hn::StoreU(hn::Mul(hn::LoadU(d, to + i), hn::Set(d, scale)), d, to + i);
    for (; i < count; ++i) to[i] *= scale;
    c += count;
    to += count;
  }
  const int next = begin + static_cast<int>(to - first);
  if (next >= end) return;
  const std::byte* const rest = row.data + format.rest_at;
  if (format.rest == DType::bf16)
    widen(reinterpret_cast<const Bfloat16*>(rest) + (next - format.coded), end - next, to);
  else
    widen(reinterpret_cast<const E4m3*>(rest) + (next - format.coded), end - next, to);
}

/// pack_keys of rows that carry their scales.
inline void pack_stored_keys(const RowFormat& format, const KeyRows& rows, Range keys,
                             float* panels) {
  HWY_ALIGN float wide[4][kMaxHeadDim];
  const float* const four[4] = {wide[0], wide[1], wide[2], wide[3]};
  for (int key = keys.begin; key < keys.end; key += 4) {
    for (int i = 0; i < 4; ++i) {
      prefetch_row<std::byte>(rows.k()[key + i + kRowsAhead], format.data_bytes());
      if (rows.k()[key + i] != nullptr)
        widen_stored(rows.stored(key + i), format, 0, format.dim, wide[i]);
      else
        std::fill_n(wide[i], format.dim, 0.0f);
    }
    transpose_four(four, format.dim, panels + key / kPanel * format.dim * kPanel + key % kPanel);
  }
}

/// pack_values of the first `dim` numbers of such rows.
inline void pack_stored_values(const RowFormat& format, const KeyRows& rows, Range keys, int dim,
                               float* panels) {
  const int last = (dim - 1) / kPanel * kPanel;  // first column of the last panel
  for (int key = keys.begin; key < keys.end; ++key) {
    prefetch_row<std::byte>(rows.k()[key + kRowsAhead], format.data_bytes());
    for (int panel = 0; panel < dim; panel += kPanel) {
      float* const to = panels + (panel / kPanel * kSegment + key) * kPanel;
      const int end = std::min(panel + kPanel, dim);
      if (rows.k()[key] != nullptr)
        widen_stored(rows.stored(key), format, panel, end, to);
      else
        std::fill_n(to, end - panel, 0.0f);
    }
    pad_row(dim - last, panels + (last / kPanel * kSegment + key) * kPanel);
  }
}

/// Packs keys of any type, and of any layout that it has.
inline void pack_any_keys(const AttendParams& p, const KeyRows& rows, Range keys, float* panels) {
  if (is_latent_row(p.kv_dtype))
    return pack_stored_keys(row_format_of(p.kv_dtype), rows, keys, panels);
  with_type(p.kv_dtype,
            [&]<class T>(const T*) { pack_keys<T>(p.k, rows.k(), keys, p.head_dim, panels); });
}

/// The same for values, and for keys that are packed as values are.
inline void pack_any_values(const AttendParams& p, const KeyRows& rows, Range keys, float* panels) {
  if (is_latent_row(p.kv_dtype))
    return pack_stored_values(row_format_of(p.kv_dtype), rows, keys, p.value_dim, panels);
  with_type(p.kv_dtype,
            [&]<class T>(const T*) { pack_values<T>(p.v, rows.v(), keys, p.value_dim, panels); });
}
inline void pack_keys_as_values(const AttendParams& p, const KeyRows& rows, Range keys,
                                float* panels) {
  if (is_latent_row(p.kv_dtype))
    return pack_stored_values(row_format_of(p.kv_dtype), rows, keys, p.head_dim, panels);
  with_type(p.kv_dtype,
            [&]<class T>(const T*) { pack_values<T>(p.k, rows.k(), keys, p.head_dim, panels); });
}

template <class T>
HWY_INLINE void pack_query(const T* q, float factor, int dim, float* to) {
  const Lanes8 d;
  int c = 0;
  for (; c + kLanes8 <= dim; c += kLanes8)
    hn::StoreU(hn::Mul(load(d, q + c), hn::Set(d, factor)), d, to + c);
  for (; c < dim; ++c) to[c] = load_one(q, c) * factor;
}

}  // namespace HWY_NAMESPACE
}  // namespace longspan::kernels::host
HWY_AFTER_NAMESPACE();

#endif  // per target
