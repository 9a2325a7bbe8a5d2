// The instructions of sm_80 and later for products of tf32: the rounding and mma.sync.
//
// Fragments of mma m16n8k8, for lane = 4 g + t (g = 0..7, t = 0..3):
//   A [16 x 8]   a0: row g, column t   a1: row g+8   a2: row g, column t+4   a3: both
//   B [8 x 8]    b0: column g, row t   b1: row t+4
//   C [16 x 8]   c0 c1: row g, columns 2t 2t+1   c2 c3: row g+8
#pragma once

#include <cstdint>

namespace longspan::kernels::cuda::arch {

/// x rounded to tf32's 10 bits of mantissa, ties away from zero. The instruction truncates a NaN
/// like any bits, so one with no bits set above the cut (0x7f800001) would become an infinity.
__device__ inline std::uint32_t to_tf32(float x) {
  std::uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;\n" : "=r"(bits) : "f"(x));
  return x == x ? bits : 0x7fffffffu;
}

/// c += a b for factors from to_tf32, fp32 accumulation.
__device__ inline void mma_tf32(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace longspan::kernels::cuda::arch
