// The one product of the host kernels, C = A B, in blocks of a few rows whose sums stay in
// registers over the whole depth. Scores (A = queries, B = keys transposed) and outputs (A =
// weights, B = values) both use it.
//
//     c[r, n] = fma(a[r, depth-1], b[depth-1, n], ... fma(a[r, 0], b[0, n], 0))
//
// Each element is one chain in the order of the depth, so its bits depend neither on the rows and
// columns around it nor on the vector width.
#include "kernels/host/targets.hpp"

#if defined(LONGSPAN_HOST_MULTIPLY_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef LONGSPAN_HOST_MULTIPLY_INL
#undef LONGSPAN_HOST_MULTIPLY_INL
#else
#define LONGSPAN_HOST_MULTIPLY_INL
#endif

#include <cstddef>

#include "hwy/highway.h"
#include "kernels/host/simd-inl.hpp"
#include "kernels/host/tile.hpp"

HWY_BEFORE_NAMESPACE();
namespace longspan::kernels::host {
namespace HWY_NAMESPACE {

// 6 rows by 4 vectors of sums, 4 vectors of B and one of A fill 32 registers; with 16 registers it
// is 6 by 2.
#if LONGSPAN_HOST_AVX512 || HWY_TARGET == HWY_NEON
inline constexpr int kVectors = 4;
#else
inline constexpr int kVectors = 2;
#endif

struct Matrix {
  const float* data;
  std::ptrdiff_t stride;  // floats from row to row

  const float* at(std::ptrdiff_t row, std::ptrdiff_t column) const {
    return data + row * stride + column;
  }
};

/// Sums of kRows by kVecs vectors in registers: left(r, k) is A's element, and use(r, v, sum) takes
/// each sum at the end.
template <int kRows, int kVecs, class Left, class Use>
HWY_INLINE void multiply_in_registers(const Left& left, Matrix b, int depth, const Use& use) {
  const Lanes d;
  Vec sums[kRows][kVecs];
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(8)
    for (int v = 0; v < kVecs; ++v) sums[r][v] = hn::Zero(d);
  }
  for (int k = 0; k < depth; ++k) {
    Vec right[kVecs];
    HWY_UNROLL(8)
    for (int v = 0; v < kVecs; ++v) right[v] = hn::LoadU(d, b.at(k, v * kLanes));
    HWY_UNROLL(8)
    for (int r = 0; r < kRows; ++r) {
      const Vec factor = hn::Set(d, left(r, k));
      HWY_UNROLL(8)
      for (int v = 0; v < kVecs; ++v) sums[r][v] = hn::MulAdd(factor, right[v], sums[r][v]);
    }
  }
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(8)
    for (int v = 0; v < kVecs; ++v) use(r, v, sums[r][v]);
  }
}

template <int kRows, int kVecs>
HWY_INLINE void multiply_block(Matrix a, Matrix b, int depth, float* c, std::ptrdiff_t c_stride) {
  multiply_in_registers<kRows, kVecs>([&](int r, int k) HWY_ATTR { return *a.at(r, k); }, b, depth,
                                      [&](int r, int v, Vec sum) HWY_ATTR {
                                        hn::StoreU(sum, Lanes(), c + r * c_stride + v * kLanes);
                                      });
}

/// C = A B, with rows <= kBlockRows and columns a multiple of 16.
HWY_NOINLINE inline void multiply(Matrix a, Matrix b, int depth, float* c, std::ptrdiff_t c_stride,
                                  int rows, int columns) {
  with_rows<kBlockRows>(rows, [&]<int kRows>() {
    int n = 0;
    for (; n + kVectors * kLanes <= columns; n += kVectors * kLanes)
      multiply_block<kRows, kVectors>(a, {b.at(0, n), b.stride}, depth, c + n, c_stride);
    for (; n < columns; n += kLanes)
      multiply_block<kRows, 1>(a, {b.at(0, n), b.stride}, depth, c + n, c_stride);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace longspan::kernels::host
HWY_AFTER_NAMESPACE();

#endif  // per target
