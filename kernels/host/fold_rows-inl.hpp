// Folds the states of 16 rows at a time, in vectors of 512 bits.
#include "kernels/host/targets.hpp"

#if defined(LONGSPAN_HOST_FOLD_ROWS_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef LONGSPAN_HOST_FOLD_ROWS_INL
#undef LONGSPAN_HOST_FOLD_ROWS_INL
#else
#define LONGSPAN_HOST_FOLD_ROWS_INL
#endif

#include <cmath>

#include "hwy/highway.h"
#include "longspan/state.hpp"

#if LONGSPAN_HOST_AVX512

HWY_BEFORE_NAMESPACE();
namespace longspan::kernels::host {
namespace HWY_NAMESPACE {

/// The stats of 16 rows.
struct StatsOfRows {
  __m512 max, sum;

  StatsOfRows(__m512 of_max, __m512 of_sum) : max(of_max), sum(of_sum) {}
  explicit StatsOfRows(const Stats* rows) {
    const __m512 low = _mm512_loadu_ps(&rows[0].max), high = _mm512_loadu_ps(&rows[8].max);
    const __m512i evens =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    max = _mm512_permutex2var_ps(low, evens, high);
    sum = _mm512_permutex2var_ps(low, _mm512_add_epi32(evens, _mm512_set1_epi32(1)), high);
  }
  void store(Stats* rows) const {
    const __m512i pairs = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i above = _mm512_add_epi32(pairs, _mm512_set1_epi32(8));
    _mm512_storeu_ps(&rows[0].max, _mm512_permutex2var_ps(max, pairs, sum));
    _mm512_storeu_ps(&rows[8].max, _mm512_permutex2var_ps(max, above, sum));
  }
  __mmask16 empty() const { return _mm512_cmp_ps_mask(sum, _mm512_setzero_ps(), _CMP_EQ_OQ); }
};

/// fold_states of 16 rows, without a branch on which side leads. If a side of a row is empty, it
/// does nothing and returns false.
HWY_INLINE bool fold_16_rows(Stats* a, float* a_o, const Stats* b, const float* b_o, int padded) {
  const StatsOfRows of_a(a), of_b(b);
  if (of_a.empty() | of_b.empty()) return false;
  const __mmask16 second = _mm512_cmp_ps_mask(of_a.max, of_b.max, _CMP_NGE_UQ);
  const __m512 high = _mm512_mask_mov_ps(of_a.max, second, of_b.max);
  const __m512 low = _mm512_mask_mov_ps(of_b.max, second, of_a.max);
  alignas(64) float ratios[16];
  _mm512_store_ps(ratios, _mm512_sub_ps(low, high));
  for (float& ratio : ratios) ratio = ::exp2f(ratio);
  const __m512 high_sum = _mm512_mask_mov_ps(of_a.sum, second, of_b.sum);
  const __m512 low_sum = _mm512_mask_mov_ps(of_b.sum, second, of_a.sum);
  StatsOfRows(high, _mm512_fmadd_ps(low_sum, _mm512_load_ps(ratios), high_sum)).store(a);
  for (int r = 0; r < 16; ++r, a_o += padded, b_o += padded) {
    const bool second_leads = (second >> r & 1) != 0;
    const float* const leads = second_leads ? b_o : a_o;
    const float* const follows = second_leads ? a_o : b_o;
    const __m512 ratio = _mm512_set1_ps(ratios[r]);
    for (int c = 0; c < padded; c += 16)
      _mm512_store_ps(
          a_o + c, _mm512_fmadd_ps(_mm512_load_ps(follows + c), ratio, _mm512_load_ps(leads + c)));
  }
  return true;
}

}  // namespace HWY_NAMESPACE
}  // namespace longspan::kernels::host
HWY_AFTER_NAMESPACE();

#endif  // LONGSPAN_HOST_AVX512

#endif  // per target
