// Keys, values and queries of a tile in the layout that multiply reads: dense fp32, in panels of 64
// columns, so that a panel's rows follow each other in the cache whatever the strides outside.
//
//     keys     [panel of 64 keys][dim][64]        transposed
//     values   [panel of 64 columns][128 keys][64]
//     queries  [rows][dim], times the score's factor
#include "kernels/host/targets.hpp"

#if defined(LONGSPAN_HOST_PACK_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef LONGSPAN_HOST_PACK_INL
#undef LONGSPAN_HOST_PACK_INL
#else
#define LONGSPAN_HOST_PACK_INL
#endif

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "kernels/host/simd-inl.hpp"
#include "kernels/host/tile.hpp"

HWY_BEFORE_NAMESPACE();
namespace longspan::kernels::host {
namespace HWY_NAMESPACE {

inline constexpr int kRowsAhead = 16;  // of prefetches

/// Rows lie a stride apart, which hides the next ones from the hardware; with few queries the time
/// is the time of these loads. The address is a number: it may lie past the keys, and nobody reads
/// it.
template <class T>
HWY_INLINE void prefetch_row(const T* k, std::int64_t row, std::int64_t stride, int dim) {
  constexpr std::uintptr_t kLine = 64;
  const auto begin = reinterpret_cast<std::uintptr_t>(k) + row * stride * sizeof(T);
  for (auto at = begin; at < begin + dim * sizeof(T); at += kLine)
    hwy::Prefetch(reinterpret_cast<const char*>(at));
}

/// to[c * kPanel + i] = rows[i][c] for c in [0, dim), i in [0, 4).
template <class T>
HWY_INLINE void transpose_four(const T* const rows[4], int dim, float* HWY_RESTRICT to) {
#if HWY_TARGET == HWY_SCALAR
  for (int c = 0; c < dim; ++c)
    for (int i = 0; i < 4; ++i) to[c * kPanel + i] = hn::GetLane(load(Lanes(), rows[i] + c));
#else
  const hn::CappedTag<float, 4> d;
  for (int c = 0; c < dim; c += 4, to += 4 * kPanel) {
    const auto a0 = load(d, rows[0] + c), a1 = load(d, rows[1] + c);
    const auto a2 = load(d, rows[2] + c), a3 = load(d, rows[3] + c);
    const auto low01 = hn::InterleaveLower(d, a0, a1), high01 = hn::InterleaveUpper(d, a0, a1);
    const auto low23 = hn::InterleaveLower(d, a2, a3), high23 = hn::InterleaveUpper(d, a2, a3);
    hn::StoreU(hn::ConcatLowerLower(d, low23, low01), d, to);
    hn::StoreU(hn::ConcatUpperUpper(d, low23, low01), d, to + kPanel);
    hn::StoreU(hn::ConcatLowerLower(d, high23, high01), d, to + 2 * kPanel);
    hn::StoreU(hn::ConcatUpperUpper(d, high23, high01), d, to + 3 * kPanel);
  }
#endif
}

/// Keys [begin, end) of a segment at k, `stride` apart; begin and end need not be aligned: what
/// is packed is, with zeros at and past `count`.
template <class T>
void pack_keys(const T* k, std::int64_t stride, Range keys, int count, int dim, float* panels) {
  static constexpr T zeros[kMaxDim] = {};
  for (int key = keys.begin; key < keys.end; key += 4) {
    const T* rows[4];
    for (int i = 0; i < 4; ++i) {
      rows[i] = key + i < count ? k + (key + i) * stride : zeros;
      prefetch_row(k, key + i + kRowsAhead, stride, dim);
    }
    transpose_four(rows, dim, panels + key / kPanel * dim * kPanel + key % kPanel);
  }
}

template <class T>
void pack_values(const T* v, std::int64_t stride, Range keys, int dim, float* panels) {
  const Lanes8 d;
  for (int key = keys.begin; key < keys.end; ++key) {
    const T* from = v + key * stride;
    float* to = panels + key * kPanel;
    prefetch_row(v, key + kRowsAhead, stride, dim);
    for (int panel = 0; panel < dim; panel += kPanel, to += kSegment * kPanel) {
      const int columns = dim - panel < kPanel ? dim - panel : kPanel;
      for (int c = 0; c < columns; c += kLanes8) hn::StoreU(load(d, from + panel + c), d, to + c);
      if (columns % 16 != 0)
        for (int c = columns; c < columns + 8; ++c) to[c] = 0.0f;
    }
  }
}

template <class T>
HWY_INLINE void pack_query(const T* q, float factor, int dim, float* to) {
  const Lanes8 d;
  for (int c = 0; c < dim; c += kLanes8)
    hn::StoreU(hn::Mul(load(d, q + c), hn::Set(d, factor)), d, to + c);
}

}  // namespace HWY_NAMESPACE
}  // namespace longspan::kernels::host
HWY_AFTER_NAMESPACE();

#endif  // per target
