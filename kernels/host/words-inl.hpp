// Transposes words of 32 bits in registers. A word is a pair of bf16, as products of bf16 take
// them.
#include "kernels/host/targets.hpp"

#if defined(LONGSPAN_HOST_WORDS_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef LONGSPAN_HOST_WORDS_INL
#undef LONGSPAN_HOST_WORDS_INL
#else
#define LONGSPAN_HOST_WORDS_INL
#endif

#include "hwy/highway.h"

#if LONGSPAN_HOST_AVX512

HWY_BEFORE_NAMESPACE();
namespace longspan::kernels::host {
namespace HWY_NAMESPACE {

/// Transposes 16 rows of 16 words.
HWY_INLINE void transpose_words(__m512i (&r)[16]) {
  __m512i t[16];
  HWY_UNROLL(16)
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  HWY_UNROLL(4)
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // r[4 g + w] has word 4 l + w of rows 4 g ... in 128-bit lane l.
  HWY_UNROLL(4)
  for (int w = 0; w < 4; ++w) {
    const __m512i a = _mm512_shuffle_i32x4(r[w], r[4 + w], 0x88);
    const __m512i b = _mm512_shuffle_i32x4(r[8 + w], r[12 + w], 0x88);
    const __m512i c = _mm512_shuffle_i32x4(r[w], r[4 + w], 0xdd);
    const __m512i d = _mm512_shuffle_i32x4(r[8 + w], r[12 + w], 0xdd);
    t[w] = _mm512_shuffle_i32x4(a, b, 0x88);
    t[8 + w] = _mm512_shuffle_i32x4(a, b, 0xdd);
    t[4 + w] = _mm512_shuffle_i32x4(c, d, 0x88);
    t[12 + w] = _mm512_shuffle_i32x4(c, d, 0xdd);
  }
  HWY_UNROLL(16)
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}

}  // namespace HWY_NAMESPACE
}  // namespace longspan::kernels::host
HWY_AFTER_NAMESPACE();

#endif  // LONGSPAN_HOST_AVX512

#endif  // per target
