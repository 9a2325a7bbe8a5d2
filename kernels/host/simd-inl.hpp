// The vectors that the host kernels use, compiled once for each instruction set (targets.hpp):
// loads that widen to fp32, exp2 and tanh, and the fold of two states' o.
#include "kernels/host/targets.hpp"

#if defined(LONGSPAN_HOST_SIMD_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef LONGSPAN_HOST_SIMD_INL
#undef LONGSPAN_HOST_SIMD_INL
#else
#define LONGSPAN_HOST_SIMD_INL
#endif

#include <cstdint>

#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "kernels/host/half.hpp"
#include "longspan/state.hpp"

HWY_BEFORE_NAMESPACE();
namespace longspan::kernels::host {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using Lanes = hn::CappedTag<float, 16>;
using Lanes8 = hn::CappedTag<float, 8>;  // for rows that are padded to 8, and ends of others
using Vec = hn::Vec<Lanes>;
inline constexpr int kLanes = hn::MaxLanes(Lanes());
inline constexpr int kLanes8 = hn::MaxLanes(Lanes8());

template <class D>
HWY_INLINE hn::Vec<D> load(D d, const float* from) {
  return hn::LoadU(d, from);
}

template <class D>
HWY_INLINE hn::Vec<D> load(D d, const Bfloat16* from) {
  const hn::Rebind<std::uint16_t, D> narrow;
  const hn::RebindToUnsigned<D> wide;
  const auto bits = hn::LoadU(narrow, reinterpret_cast<const std::uint16_t*>(from));
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(wide, bits)));
}

/// Converts the bits of an fp16 to fp32. Without an instruction for it, this moves exponent and
/// mantissa into place and multiplies by 2^(127 - 15), which is exact and makes subnormals normal;
/// then it restores the exponent of infinities and NaNs.
template <class D>
HWY_INLINE hn::Vec<D> widen_half(D d, hn::Vec<hn::Rebind<std::uint16_t, D>> half) {
#if LONGSPAN_HOST_AVX512 || HWY_TARGET == HWY_AVX2
  return hn::PromoteTo(d, hn::BitCast(hn::Rebind<hwy::float16_t, D>(), half));
#else
  const hn::RebindToUnsigned<D> wide;
  const auto bits = hn::PromoteTo(wide, half);
  const auto magnitude = hn::And(bits, hn::Set(wide, 0x7fffu));
  const auto sign = hn::ShiftLeft<16>(hn::Xor(bits, magnitude));
  const auto value = hn::Mul(hn::BitCast(d, hn::ShiftLeft<13>(magnitude)), hn::Set(d, 0x1p112f));
  const auto finite = hn::Lt(value, hn::Set(d, 0x1p16f));
  const auto special = hn::BitCast(d, hn::Or(hn::BitCast(wide, value), hn::Set(wide, 0x7f800000u)));
  return hn::Or(hn::IfThenElse(finite, value, special), hn::BitCast(d, sign));
#endif
}

template <class D>
HWY_INLINE hn::Vec<D> load(D d, const Half* from) {
  const hn::Rebind<std::uint16_t, D> half;
  return widen_half(d, hn::LoadU(half, reinterpret_cast<const std::uint16_t*>(from)));
}

/// e5m2 is the upper half of an fp16.
template <class D>
HWY_INLINE hn::Vec<D> load(D d, const E5m2* from) {
  const hn::Rebind<std::uint8_t, D> narrow;
  const hn::Rebind<std::uint16_t, D> half;
  const auto bits = hn::LoadU(narrow, reinterpret_cast<const std::uint8_t*>(from));
  return widen_half(d, hn::ShiftLeft<8>(hn::PromoteTo(half, bits)));
}

/// An e4m3 in the bits of an fp16 is 2^-8 of its value. The one code that is NaN has all bits set,
/// so only there an addition to the lowest bit carries into the highest bit of the exponent.
template <class D>
HWY_INLINE hn::Vec<D> load(D d, const E4m3* from) {
  const hn::Rebind<std::int8_t, D> narrow;
  const hn::Rebind<std::int16_t, D> half;
  const auto bits = hn::LoadU(narrow, reinterpret_cast<const std::int8_t*>(from));
  const auto moved = hn::And(hn::ShiftLeft<7>(hn::PromoteTo(half, bits)),
                             hn::Set(half, static_cast<std::int16_t>(0xbf80)));
  const auto carry = hn::And(hn::Add(moved, hn::Set(half, 0x80)), hn::Set(half, 0x4000));
  const auto whole = hn::BitCast(hn::RebindToUnsigned<decltype(half)>(), hn::Or(moved, carry));
  return hn::Mul(widen_half(d, whole), hn::Set(d, 0x1p8f));
}

/// 2^x for x <= 0, within 1 ulp; exactly 0 below -127, so also at -inf. NaN stays NaN. x = n + f
/// with |f| <= 1/2 by adding and subtracting 1.5 * 2^23, whose low bits then hold n.
HWY_INLINE Vec exp2(Vec x) {
  const Lanes d;
  const hn::RebindToUnsigned<Lanes> bits;
  const Vec low = hn::Set(d, -127.0f);
  x = hn::IfThenElse(hn::Lt(x, low), low, x);  // Max may lose a NaN
  const Vec shifter = hn::Set(d, 0x1.8p23f);
  const Vec shifted = hn::Add(x, shifter);
  const Vec f = hn::Sub(x, hn::Sub(shifted, shifter));
  Vec p = hn::Set(d, 1.5453163e-4f);
  p = hn::MulAdd(p, f, hn::Set(d, 1.3390863e-3f));
  p = hn::MulAdd(p, f, hn::Set(d, 9.6180830e-3f));
  p = hn::MulAdd(p, f, hn::Set(d, 5.5503570e-2f));
  p = hn::MulAdd(p, f, hn::Set(d, 2.4022651e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 6.9314718e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 1.0f));
  const auto exponent = hn::Add(hn::BitCast(bits, shifted), hn::Set(bits, 127u));
  return hn::Mul(p, hn::BitCast(d, hn::ShiftLeft<23>(exponent)));
}

HWY_INLINE Vec tanh(Vec x) { return hn::Tanh(Lanes(), x); }

inline constexpr int kLaneSums = 16 / kLanes;  // vectors that hold the 16 lanes of a sum

/// Adds the upper half to the lower half, until one lane is left.
template <class D>
HWY_INLINE float sum_halves([[maybe_unused]] D d, hn::Vec<D> lanes) {
#if HWY_TARGET != HWY_SCALAR
  if constexpr (hn::MaxLanes(d) > 1) {
    const hn::Half<D> half;
    return sum_halves(half, hn::Add(hn::LowerHalf(half, lanes), hn::UpperHalf(half, lanes)));
  }
#endif
  return hn::GetLane(lanes);
}

/// The sum of 16 lanes in one shape: lane i with lane i + 8, then i + 4, i + 2, i + 1.
HWY_INLINE float sum_lanes(Vec (&lanes)[kLaneSums]) {
  for (int half = kLaneSums / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] = hn::Add(lanes[i], lanes[i + half]);
  return sum_halves(Lanes(), lanes[0]);
}

/// Calls f<rows>() for rows in [1, kRows].
template <int kRows, class F>
HWY_INLINE void with_rows(int rows, F&& f) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return with_rows<kRows - 1>(rows, f);
  }
  f.template operator()<kRows>();
}

/// Folds elements [0, n): a = fold(a, b). n is a multiple of 8.
HWY_INLINE void fold_row(const Fold& fold, float* HWY_RESTRICT a, const float* HWY_RESTRICT b,
                         int n) {
  if (fold.take == Fold::first) return;
#if HWY_NATIVE_FMA
  if (fold.take != Fold::second) {
    const Lanes8 d;
    const auto ratio = hn::Set(d, fold.ratio);
    if (fold.take == Fold::first_high) {
      for (int c = 0; c < n; c += kLanes8)
        hn::StoreU(hn::MulAdd(hn::LoadU(d, b + c), ratio, hn::LoadU(d, a + c)), d, a + c);
    } else {
      for (int c = 0; c < n; c += kLanes8)
        hn::StoreU(hn::MulAdd(hn::LoadU(d, a + c), ratio, hn::LoadU(d, b + c)), d, a + c);
    }
    return;
  }
#endif
  for (int c = 0; c < n; ++c) a[c] = fold(a[c], b[c]);
}

/// Whether all numbers of a row are finite; n is a multiple of kLanes.
HWY_INLINE bool is_finite_row(const float* row, int n) {
  const Lanes d;
  Vec zero = hn::Zero(d);  // times a finite number: 0; times any other: NaN
  for (int c = 0; c < n; c += kLanes) zero = hn::MulAdd(hn::LoadU(d, row + c), hn::Zero(d), zero);
  return hn::AllTrue(d, hn::Eq(zero, hn::Zero(d)));
}

}  // namespace HWY_NAMESPACE
}  // namespace longspan::kernels::host
HWY_AFTER_NAMESPACE();

#endif  // per target
