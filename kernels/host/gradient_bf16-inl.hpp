// The products of backward by AVX-512 BF16 (DTypes::bf16_products). One instruction adds, for each
// of 16 fp32 sums, the products of a pair of the depth; the depth of every product lies in pairs:
//
//     c[r, n] += a[r, 2 k + 1] b[2 k + 1, n] + a[r, 2 k] b[2 k, n]   for k = 0, 1 ...
//
// Each element is one chain in the order of the depth. Subnormal factors and sums count as 0, so
// that pairs of zeros change no sum: its bits do not depend on what is around it.
#include "kernels/host/targets.hpp"

#if defined(LONGSPAN_HOST_GRADIENT_BF16_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef LONGSPAN_HOST_GRADIENT_BF16_INL
#undef LONGSPAN_HOST_GRADIENT_BF16_INL
#else
#define LONGSPAN_HOST_GRADIENT_BF16_INL
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hwy/highway.h"
#include "kernels/host/bf16_tile.hpp"
#include "kernels/host/gradient_tile.hpp"
#include "kernels/host/key_rows.hpp"
#include "kernels/host/simd-inl.hpp"
#include "kernels/host/words-inl.hpp"
#include "longspan/limits.hpp"

#undef LONGSPAN_HOST_BF16_DOT
#define LONGSPAN_HOST_BF16_DOT (LONGSPAN_HOST_AVX512 && LONGSPAN_COMPILES_AVX512_BF16)

#if LONGSPAN_HOST_BF16_DOT

HWY_PUSH_ATTRIBUTES(HWY_TARGET_STR ",avx512bf16")
namespace longspan::kernels::host {
namespace HWY_NAMESPACE {

using Pair = Bf16Operands::Pair;

/// A factor whose depth is in pairs: pair k of row r is at data[r * row + k * depth].
struct LeftPairs {
  const Pair* data;
  std::ptrdiff_t row;
  std::ptrdiff_t depth;
};
/// Pair k of column n is at data[k * stride + n].
struct RightPairs {
  const Pair* data;
  std::ptrdiff_t stride;
};

HWY_INLINE __m512 add_pairs(__m512 sums, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}
HWY_INLINE __m512i repeated(Pair pair) { return _mm512_set1_epi32(static_cast<int>(pair)); }

template <bool kAdds, int kRows, int kVecs>
HWY_INLINE void multiply_pairs_block(LeftPairs a, RightPairs b, int depth, float* c,
                                     std::ptrdiff_t c_stride) {
  __m512 sums[kRows][kVecs];
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(8)
    for (int v = 0; v < kVecs; ++v) sums[r][v] = _mm512_setzero_ps();
  }
  for (int k = 0; k < depth; ++k) {
    __m512i right[kVecs];
    HWY_UNROLL(8)
    for (int v = 0; v < kVecs; ++v) right[v] = _mm512_loadu_si512(b.data + k * b.stride + v * 16);
    HWY_UNROLL(8)
    for (int r = 0; r < kRows; ++r) {
      const __m512i left = repeated(a.data[r * a.row + k * a.depth]);
      HWY_UNROLL(8)
      for (int v = 0; v < kVecs; ++v) sums[r][v] = add_pairs(sums[r][v], left, right[v]);
    }
  }
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(8)
    for (int v = 0; v < kVecs; ++v) {
      float* const to = c + r * c_stride + v * 16;
      _mm512_storeu_ps(to, kAdds ? _mm512_add_ps(_mm512_loadu_ps(to), sums[r][v]) : sums[r][v]);
    }
  }
}

/// C = A B, or with kAdds C += A B; `depth` counts pairs, and columns are a multiple of 16. Blocks
/// of columns are outermost, so that a block of B stays in the L1 cache.
template <bool kAdds>
HWY_NOINLINE void multiply_pairs(LeftPairs a, RightPairs b, int depth, float* c,
                                 std::ptrdiff_t c_stride, int rows, int columns) {
  for (int n = 0; n < columns;) {
    const bool wide = n + 64 <= columns;
    for (int r = 0; r < rows; r += kBlockRows) {
      const LeftPairs left{a.data + r * a.row, a.row, a.depth};
      const RightPairs right{b.data + n, b.stride};
      float* const to = c + r * c_stride + n;
      with_rows<kBlockRows>(std::min(kBlockRows, rows - r), [&]<int kRows>() {
        if (wide)
          multiply_pairs_block<kAdds, kRows, 4>(left, right, depth, to, c_stride);
        else
          multiply_pairs_block<kAdds, kRows, 1>(left, right, depth, to, c_stride);
      });
    }
    n += wide ? 64 : 16;
  }
}

/// The same sums, but what is multiplied by 0 is skipped: infinity and NaN in B then reach only the
/// rows of C that have a weight for them.
HWY_NOINLINE inline void add_seen_pairs(LeftPairs a, RightPairs b, int depth, float* c,
                                        std::ptrdiff_t c_stride, int rows, int columns) {
  alignas(64) float sums[kMaxHeadDim + 16];
  for (int r = 0; r < rows; ++r) {
    std::fill_n(sums, columns, 0.0f);
    for (int k = 0; k < depth; ++k) {
      const Pair factors = a.data[r * a.row + k * a.depth];
      const Pair seen = ((factors & 0x7fffu) != 0 ? 0xffffu : 0u) |
                        ((factors & 0x7fff0000u) != 0 ? 0xffff0000u : 0u);
      if (seen == 0) continue;
      for (int n = 0; n < columns; n += 16) {
        const __m512i right =
            _mm512_and_si512(_mm512_loadu_si512(b.data + k * b.stride + n), repeated(seen));
        _mm512_store_ps(sums + n, add_pairs(_mm512_load_ps(sums + n), repeated(factors), right));
      }
    }
    for (int n = 0; n < columns; n += 16) {
      float* const to = c + r * c_stride + n;
      _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), _mm512_load_ps(sums + n)));
    }
  }
}

/// Two vectors of fp32 as bf16, the first one's numbers first.
HWY_INLINE __m512i round_vectors(const float* first, const float* second) {
  return reinterpret_cast<__m512i>(
      _mm512_cvtne2ps_pbh(_mm512_load_ps(second), _mm512_load_ps(first)));
}

/// Rounds weights and dX of `rows` rows and the keys `any`: in rows, whose pairs are keys, and in
/// pairs of rows, which begin with `first` of the tile. A row that an odd number lacks is zeros.
HWY_NOINLINE inline void round_weights(const Bf16Operands& to, const float* weights,
                                       const float* dx, int first, int rows, Range any) {
  const __m512i in_turn =
      _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                       21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  alignas(64) static constexpr float zeros[kSegment] = {};
  for (int r = 0; r < rows; r += 2) {
    const bool both = r + 1 < rows;
    Pair* const p_pairs = to.p_pairs + (first + r) / 2 * kSegment;
    Pair* const dx_pairs = to.dx_pairs + (first + r) / 2 * kSegment;
    Bf16Operands::Element* const dx_rows = to.dx_rows + (first + r) * kSegment;
    const float *const p0 = weights + r * kSegment, *const p1 = both ? p0 + kSegment : zeros;
    const float *const d0 = dx + r * kSegment, *const d1 = both ? d0 + kSegment : zeros;
    for (int j = any.begin; j < any.end; j += 16) {
      _mm512_store_si512(p_pairs + j,
                         _mm512_permutexvar_epi16(in_turn, round_vectors(p0 + j, p1 + j)));
      const __m512i rounded = round_vectors(d0 + j, d1 + j);
      _mm512_store_si512(dx_pairs + j, _mm512_permutexvar_epi16(in_turn, rounded));
      _mm256_store_si256(reinterpret_cast<__m256i*>(dx_rows + j), _mm512_castsi512_si256(rounded));
      if (both)
        _mm256_store_si256(reinterpret_cast<__m256i*>(dx_rows + kSegment + j),
                           _mm512_extracti64x4_epi64(rounded, 1));
    }
  }
}

/// Copies a row and pads it to `columns`, a multiple of 16, with zeros; null: zeros. Returns
/// whether all of it is finite.
HWY_INLINE bool copy_padded(const Bfloat16* from, int dim, int columns, Bf16Operands::Element* to) {
  if (from == nullptr) dim = 0;
  if (dim > 0) std::memcpy(to, from, static_cast<std::size_t>(dim) * 2);
  std::fill(to + dim, to + columns, Bf16Operands::Element{0});
  const __m256i infinite = _mm256_set1_epi16(0x7f80);
  __mmask16 bad = 0;
  for (int c = 0; c < columns; c += 16) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(to + c));
    bad |= _mm256_cmpeq_epi16_mask(_mm256_and_si256(bits, infinite), infinite);
  }
  return bad == 0;
}

/// Joins neighbouring rows [count, columns] into pairs [count / 2, columns]; a row that an odd
/// count lacks is zeros.
HWY_NOINLINE inline void pair_rows(const Bf16Operands::Element* rows, int count, int columns,
                                   Pair* to) {
  const auto wide = [](const Bf16Operands::Element* from) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  };
  for (int r = 0; r < count; r += 2, to += columns, rows += 2 * columns)
    for (int c = 0; c < columns; c += 16) {
      const __m512i second = r + 1 < count ? wide(rows + columns + c) : _mm512_setzero_si512();
      _mm512_store_si512(to + c, _mm512_or_si512(wide(rows + c), _mm512_slli_epi32(second, 16)));
    }
}

/// Transposes rows of keys [count, columns], a multiple of 16 both, to panels of 64 keys
/// [2, columns / 2, 64] of pairs.
HWY_NOINLINE inline void transpose_pairs(const Bf16Operands::Element* rows, int count, int columns,
                                         Pair* to) {
  for (int key = 0; key < count; key += 16) {
    Pair* const panel = to + key / kPanel * columns / 2 * kPanel + key % kPanel;
    for (int c = 0; c < columns; c += 32) {
      const int words = std::min(16, (columns - c) / 2);
      const auto mask = static_cast<__mmask16>((1u << words) - 1);
      __m512i r[16];
      HWY_UNROLL(16)
      for (int i = 0; i < 16; ++i)
        r[i] = _mm512_maskz_loadu_epi32(mask, rows + (key + i) * columns + c);
      transpose_words(r);
      for (int i = 0; i < words; ++i) _mm512_store_si512(panel + (c / 2 + i) * kPanel, r[i]);
    }
  }
}

inline void pack_gradient_keys_bf16(const GradientParams& p, const KeyRows& rows,
                                    const GradientSpace& space, PackedKeyRows& packed) {
  const Bf16Operands to(space, p);
  const Range all = aligned({0, packed.segment.keys});
  const int columns = GradientSums::padded(p.head_dim);
  const int value_columns = GradientSums::padded(p.value_dim);
  for (int j = 0; j < all.end; ++j) {
    packed.finite &= copy_padded(reinterpret_cast<const Bfloat16*>(rows.k()[j]), p.head_dim,
                                 columns, to.key_rows + j * columns);
    copy_padded(reinterpret_cast<const Bfloat16*>(rows.v()[j]), p.value_dim, value_columns,
                to.value_rows + j * value_columns);
  }
  pair_rows(to.key_rows, all.end, columns, to.key_pairs);
  transpose_pairs(to.key_rows, all.end, columns, to.keys);
  transpose_pairs(to.value_rows, all.end, value_columns, to.values);
}

inline void pack_gradient_rows_bf16(const GradientParams& p, const Tile& tile,
                                    const GradientSpace& space, PackedQueryRows& packed) {
  const Bf16Operands to(space, p);
  const int columns = GradientSums::padded(p.head_dim);
  const int value_columns = GradientSums::padded(p.value_dim);
  for_each_row(p, tile, [&](int r, std::int64_t token, std::int64_t head) {
    packed.finite &=
        copy_padded(p.q.at<const Bfloat16>(token, head), p.head_dim, columns, to.q + r * columns);
    packed.finite &= copy_padded(p.dout.at<const Bfloat16>(token, head), p.value_dim, value_columns,
                                 to.dout + r * value_columns);
  });
  pair_rows(to.q, tile.rows, columns, to.q_pairs);
  pair_rows(to.dout, tile.rows, value_columns, to.dout_pairs);
}

/// The products of a tile and a segment, packed by the functions above.
class Bf16Products {
 public:
  Bf16Products(const GradientParams& p, const Tile& tile, const PackedQueryRows& rows,
               const PackedKeyRows& keys, const GradientSpace& space)
      : rows_(rows),
        keys_(keys),
        tile_rows_(tile.rows),
        columns_(GradientSums::padded(p.head_dim)),
        value_columns_(GradientSums::padded(p.value_dim)),
        of_(space, p) {}

  /// S, and then P, of a row; and dP, and then dX. Those of one block of rows are there at a time.
  float* scores(int r) const { return of_.scores + r % kBlockRows * kSegment; }
  float* dx(int r) const { return of_.dx + r % kBlockRows * kSegment; }

  void multiply_rows(int first, int rows, int panel, int begin, int columns) const {
    const int at = begin - panel;
    multiply_pairs<false>(
        {reinterpret_cast<const Pair*>(of_.q + first * columns_), columns_ / 2, 1},
        {of_.keys + panel * columns_ / 2 + at, kPanel}, columns_ / 2, scores(first) + begin,
        kSegment, rows, columns);
    multiply_pairs<false>(
        {reinterpret_cast<const Pair*>(of_.dout + first * value_columns_), value_columns_ / 2, 1},
        {of_.values + panel * value_columns_ / 2 + at, kPanel}, value_columns_ / 2,
        dx(first) + begin, kSegment, rows, columns);
  }
  void keep_weights(int first, int rows, Range any) const {
    round_weights(of_, scores(first), dx(first), first, rows, any);
  }
  void add_to_dq(int first, int rows, Range keys, float* dq) const {
    add(keys_.finite,
        {reinterpret_cast<const Pair*>(of_.dx_rows + first * kSegment + keys.begin), kSegment / 2,
         1},
        {of_.key_pairs + keys.begin / 2 * columns_, columns_}, (keys.end - keys.begin) / 2, dq,
        rows, columns_);
  }
  void add_to_keys(Range any, float* dk, float* dv) const {
    const int depth = (tile_rows_ + 1) / 2, count = any.end - any.begin;
    add(rows_.finite, {of_.p_pairs + any.begin, 1, kSegment}, {of_.dout_pairs, value_columns_},
        depth, dv + any.begin * value_columns_, count, value_columns_);
    add(rows_.finite, {of_.dx_pairs + any.begin, 1, kSegment}, {of_.q_pairs, columns_}, depth,
        dk + any.begin * columns_, count, columns_);
  }

 private:
  static void add(bool finite, LeftPairs a, RightPairs b, int depth, float* c, int rows,
                  int columns) {
    if (finite)
      multiply_pairs<true>(a, b, depth, c, columns, rows, columns);
    else
      add_seen_pairs(a, b, depth, c, columns, rows, columns);
  }

  const PackedQueryRows& rows_;
  const PackedKeyRows& keys_;
  const int tile_rows_, columns_, value_columns_;
  const Bf16Operands of_;
};

}  // namespace HWY_NAMESPACE
}  // namespace longspan::kernels::host
HWY_POP_ATTRIBUTES

#endif  // LONGSPAN_HOST_BF16_DOT

#endif  // per target
