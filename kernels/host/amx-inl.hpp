// Products of bf16 on AMX, and the weights between them. A tile register has 16 rows of 64 bytes.
// For each fp32 of 16 x 16, one instruction adds the 32 products of a row on the left and a column
// on the right, whose pairs of the depth are adjacent:
//
//     c[r, n] += sum over d in [0, 16) of a[r, 2 d] b[d, n, 0] + a[r, 2 d + 1] b[d, n, 1]
//
// The order of the sums is that of the instruction, the same for each element. Subnormal factors
// count as 0.
#include "kernels/host/targets.hpp"

#if defined(LONGSPAN_HOST_AMX_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef LONGSPAN_HOST_AMX_INL
#undef LONGSPAN_HOST_AMX_INL
#else
#define LONGSPAN_HOST_AMX_INL
#endif

#include <atomic>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/host/bf16_tile.hpp"
#include "kernels/host/pack-inl.hpp"
#include "kernels/host/simd-inl.hpp"

#undef LONGSPAN_HOST_AMX
#define LONGSPAN_HOST_AMX (LONGSPAN_HOST_AVX512 && LONGSPAN_COMPILES_AMX)

#if LONGSPAN_HOST_AMX

HWY_BEFORE_NAMESPACE();
HWY_PUSH_ATTRIBUTES("avx512bf16,amx-tile,amx-bf16")
namespace longspan::kernels::host {
namespace HWY_NAMESPACE {

using Element = Bf16Space::Element;
constexpr int kTile = Bf16Space::kTile;

/// Configures the tile registers during its lifetime: all with 16 rows of 64 bytes.
class TileRegisters {
 public:
  TileRegisters() {
    alignas(64) struct {
      std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
      std::uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    _tile_loadconfig(&config);
  }
  ~TileRegisters() { _tile_release(); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
};

/// Keeps loads of tiles after earlier stores. GCC's intrinsics do not declare that they read
/// memory.
HWY_INLINE void stores_end() { std::atomic_signal_fence(std::memory_order_seq_cst); }

/// Location of the tiles of a factor.
struct Operand {
  const Element* data = nullptr;
  std::int64_t along = 0;    // elements from tile to tile along the rows of A, or the columns of B
  std::int64_t depth = 0;    // and along the depth
  std::int64_t stride = 64;  // of A: bytes from row to row of a tile
};

/// C = A B, in steps, so that other work can be interleaved. A step adds one tile of the depth to
/// the sums of one or two tiles of rows by as many of columns, in tile registers 0 to 3, or stores
/// them. A store directly after their last product would wait for it. Products run one after
/// another; they do not overlap.
class TileProduct {
 public:
  TileProduct() = default;
  TileProduct(Operand a, Operand b, int depth, float* c, std::int64_t c_stride, int rows,
              int columns)
      : a_(a), b_(b), c_(c), c_stride_(c_stride), depth_(depth), rows_(rows), columns_(columns) {}

  int steps() const { return (columns_ + 1) / 2 * (depth_ + 1); }
  bool done() const { return columns_ == 0; }

  HWY_INLINE void step() {
    if (d_ == depth_) return store();
    if (d_ == 0) zero();
    const Element* left = a_.data + d_ * a_.depth;
    const Element* right = b_.data + d_ * b_.depth;
    _tile_loadd(4, left, a_.stride);
    _tile_loadd(6, right, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (rows_ > 1 && columns_ > 1) {
      _tile_loadd(7, right + b_.along, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, left + a_.along, a_.stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    } else if (columns_ > 1) {
      _tile_loadd(7, right + b_.along, 64);
      _tile_dpbf16ps(1, 4, 7);
    } else if (rows_ > 1) {
      _tile_loadd(5, left + a_.along, a_.stride);
      _tile_dpbf16ps(2, 5, 6);
    }
    ++d_;
  }

  void run() {
    while (!done()) step();
  }

 private:
  static void zero() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }

  HWY_INLINE void store() {
    const std::int64_t bytes = c_stride_ * 4;
    float* const below = c_ + 16 * c_stride_;
    _tile_stored(0, c_, bytes);
    if (columns_ > 1) _tile_stored(1, c_ + 16, bytes);
    if (rows_ > 1) {
      _tile_stored(2, below, bytes);
      if (columns_ > 1) _tile_stored(3, below + 16, bytes);
    }
    d_ = 0;
    c_ += 32;
    b_.data += 2 * b_.along;
    columns_ = columns_ > 2 ? columns_ - 2 : 0;
  }

  Operand a_, b_;
  float* c_ = nullptr;
  std::int64_t c_stride_ = 0;
  int depth_ = 0, rows_ = 0, columns_ = 0;  // in tiles; remaining columns
  int d_ = 0;
};

/// 2^x within 2 ulp, 0 at -inf. x = n + f with n the floor, f in [0, 1).
HWY_INLINE __m512 exp2_floor(__m512 x) {
  const __m512 f = _mm512_reduce_ps(x, 0x9);
  __m512 p = _mm512_set1_ps(1.86713005e-3f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.01703071e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.57999127e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.40164444e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.93151295e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, x);
}

/// Reduces neighbours with f, in pairs: sums, for example.
template <int kVecs, class F>
HWY_INLINE __m512 fold_vectors(const __m512 (&v)[kVecs], F f) {
  __m512 pairs[kVecs / 2];
  HWY_UNROLL(4)
  for (int i = 0; i < kVecs / 2; ++i) pairs[i] = f(v[2 * i], v[2 * i + 1]);
  if constexpr (kVecs == 2) return pairs[0];
  if constexpr (kVecs == 4) return f(pairs[0], pairs[1]);
  if constexpr (kVecs == 6) return f(f(pairs[0], pairs[1]), pairs[2]);
  if constexpr (kVecs == 8) return f(f(pairs[0], pairs[1]), f(pairs[2], pairs[3]));
}

/// Turns scores times a positive factor, of which a row sees `own`, into weights rounded to bf16;
/// returns the max and the sum of the weights before rounding. The weights may overwrite the
/// scores. No row of the block sees keys past kVecs * 16, which would add exact zeros.
template <int kVecs>
HWY_INLINE Stats weigh_bf16(const float* scores, Range own, float factor, Element* weights) {
  __m512 s[kVecs];
  HWY_UNROLL(8)
  for (int i = 0; i < kVecs; ++i) s[i] = _mm512_load_ps(scores + i * 16);
  if (own.begin > 0 || own.end < kVecs * 16) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i count = _mm512_set1_epi32(own.end - own.begin);  // as unsigned
    const __m512 hidden = _mm512_set1_ps(-infinity());
    HWY_UNROLL(8)
    for (int i = 0; i < kVecs; ++i) {
      const __m512i at = _mm512_add_epi32(lane, _mm512_set1_epi32(i * 16 - own.begin));
      s[i] = _mm512_mask_mov_ps(hidden, _mm512_cmplt_epu32_mask(at, count), s[i]);
    }
  }
  const __m512 top = fold_vectors(s, [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); });
  const float max = _mm512_reduce_max_ps(top) * factor;
  // If no key is visible, the weights are exp2(-inf) = 0. A NaN, whether max keeps it or not, stays
  // in its weight.
  const __m512 shift = _mm512_set1_ps(max == -infinity() ? 0.0f : max);
  const __m512 times = _mm512_set1_ps(factor);
  HWY_UNROLL(8)
  for (int i = 0; i < kVecs; ++i) s[i] = exp2_floor(_mm512_fmsub_ps(s[i], times, shift));
  HWY_UNROLL(4)
  for (int i = 0; i < kVecs; i += 2)
    _mm512_store_si512(weights + i / 2 * 32,
                       reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(s[i + 1], s[i])));
  const __m512 sum = fold_vectors(s, [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); });
  return {max, _mm512_reduce_add_ps(sum)};
}

}  // namespace HWY_NAMESPACE
}  // namespace longspan::kernels::host
HWY_POP_ATTRIBUTES
HWY_AFTER_NAMESPACE();

#endif  // LONGSPAN_HOST_AMX

#endif  // per target
