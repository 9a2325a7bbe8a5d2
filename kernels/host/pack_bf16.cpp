// Packs keys and values as operands of products of bf16 (bf16_tile.hpp).
#include "kernels/host/targets.hpp"
// Highway compiles the rest of this file once for each target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/pack_bf16.cpp"
#include "hwy/foreach_target.h"  // first
//
#include "hwy/highway.h"
#include "kernels/host/bf16_tile.hpp"
#include "kernels/host/key_rows.hpp"
#include "kernels/host/pack-inl.hpp"
#include "kernels/host/simd-inl.hpp"
#include "kernels/host/words-inl.hpp"
#include "longspan/error.hpp"

HWY_BEFORE_NAMESPACE();
namespace longspan::kernels::host {
namespace HWY_NAMESPACE {

#if LONGSPAN_HOST_AVX512

using Element = Bf16Space::Element;
constexpr int kTile = Bf16Space::kTile;

/// Packs keys of dense bf16 rows, dim a multiple of 32. `keys` is aligned to 16.
HWY_NOINLINE void pack_bf16_keys(const std::byte* const* rows, Range keys, int dim, Element* to) {
  alignas(64) static constexpr std::byte zeros[kMaxHeadDim * 2] = {};
  const int depth = dim / 32;
  for (int key = keys.begin; key < keys.end; key += 16) {
    Element* tile = to + key / 16 * depth * kTile;
    for (int d = 0; d < depth; ++d, tile += kTile) {
      __m512i r[16];
      HWY_UNROLL(16)
      for (int i = 0; i < 16; ++i) {
        const std::byte* row = rows[key + i] ? rows[key + i] : zeros;
        r[i] = _mm512_loadu_si512(row + d * 64);
      }
      transpose_words(r);
      HWY_UNROLL(16)
      for (int i = 0; i < 16; ++i) _mm512_store_si512(tile + i * 32, r[i]);
    }
  }
}

/// Packs values of dense bf16 rows, dim a multiple of 32; returns whether all are finite. `keys` is
/// aligned to 32.
HWY_NOINLINE bool pack_bf16_values(const std::byte* const* rows, Range keys, int dim, Element* to) {
  alignas(64) static constexpr std::byte zeros[kMaxValueDim * 2] = {};
  const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
  const __m512i high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  const __m512i infinite = _mm512_set1_epi16(0x7f80);
  __mmask32 bad = 0;
  for (int key = keys.begin; key < keys.end; key += 2) {
    const std::byte* first = rows[key] ? rows[key] : zeros;
    const std::byte* second = rows[key + 1] ? rows[key + 1] : zeros;
    Element* pair = to + key / 32 * (dim / 16) * kTile + key % 32 / 2 * 32;
    for (int c = 0; c < dim; c += 32, pair += 2 * kTile) {
      const __m512i a = _mm512_loadu_si512(first + c * 2);
      const __m512i b = _mm512_loadu_si512(second + c * 2);
      bad |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(a, infinite), infinite) |
             _mm512_cmpeq_epi16_mask(_mm512_and_si512(b, infinite), infinite);
      const __m512i even = _mm512_unpacklo_epi16(a, b), odd = _mm512_unpackhi_epi16(a, b);
      _mm512_store_si512(pair, _mm512_permutex2var_epi64(even, low, odd));
      _mm512_store_si512(pair + kTile, _mm512_permutex2var_epi64(even, high, odd));
    }
  }
  return bad == 0;
}

/// Pairs of two rows of fp32, as bf16.
HWY_INLINE __m512i pair_rows(const float* first, const float* second) {
  const __m512i a = _mm512_castps_si512(_mm512_loadu_ps(first));
  const __m512i b = _mm512_castps_si512(_mm512_loadu_ps(second));
  return _mm512_or_si512(_mm512_srli_epi32(a, 16),
                         _mm512_and_si512(b, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

/// Packs keys from panels of fp32 (pack_keys).
HWY_NOINLINE void pack_wide_keys(const float* panels, Range keys, int dim, Element* to) {
  static constexpr float zeros[16] = {};
  const int depth = (dim + 31) / 32;
  for (int key = keys.begin; key < keys.end; key += 16) {
    const float* from = panels + key / kPanel * dim * kPanel + key % kPanel;
    Element* pair = to + key / 16 * depth * kTile;
    const auto column = [&](int d) { return d < dim ? from + d * kPanel : zeros; };
    for (int d = 0; d < depth * 32; d += 2, pair += 32)
      _mm512_store_si512(pair, pair_rows(column(d), column(d + 1)));
  }
}

/// Packs values from panels of fp32 (pack_values), and returns whether all are finite.
HWY_NOINLINE bool pack_wide_values(const float* panels, Range keys, int dim, Element* to) {
  const __m512i infinite = _mm512_set1_epi16(0x7f80);
  const int columns = (dim + 15) / 16;
  __mmask32 bad = 0;
  for (int key = keys.begin; key < keys.end; key += 2) {
    Element* pair = to + key / 32 * columns * kTile + key % 32 / 2 * 32;
    for (int c = 0; c < columns * 16; c += 16, pair += kTile) {
      const float* from = panels + (c / kPanel * kSegment + key) * kPanel + c % kPanel;
      const __m512i both = pair_rows(from, from + kPanel);
      bad |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(both, infinite), infinite);
      _mm512_store_si512(pair, both);
    }
  }
  return bad == 0;
}

bool pack_bf16_segment(const AttendParams& p, const KeyRows& rows, Range keys, float* wide,
                       Element* to) {
  Element* const values = to + Bf16Space::key_elements(p);
  if (packs_dense_bf16(p)) {
    pack_bf16_keys(rows.k(), keys, p.head_dim, to);
    return pack_bf16_values(rows.v(), keys, p.value_dim, values);
  }
  pack_any_keys(p, rows, keys, wide);
  pack_wide_keys(wide, keys, p.head_dim, to);
  pack_any_values(p, rows, keys, wide);
  return pack_wide_values(wide, keys, p.value_dim, values);
}

#else

bool pack_bf16_segment(const AttendParams&, const KeyRows&, Range, float*, Bf16Space::Element*) {
  throw Error(ErrorKind::internal, "operands of bf16 products, which this target does not have");
}

#endif

}  // namespace HWY_NAMESPACE
}  // namespace longspan::kernels::host
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace longspan::kernels::host {

HWY_EXPORT(pack_bf16_segment);

bool pack_bf16_segment(const AttendParams& params, const KeyRows& rows, Range keys, float* wide,
                       Bf16Space::Element* to) {
  return HWY_DYNAMIC_DISPATCH(pack_bf16_segment)(params, rows, keys, wide, to);
}

}  // namespace longspan::kernels::host
#endif
