// The instructions of sm_80 and later that the portable kernels use: mma.sync, ldmatrix, cp.async,
// ex2. PTX appears only here and in the other files of this folder.
//
// Fragments of mma m16n8k16, for lane = 4 g + t (g = 0..7, t = 0..3):
//   A [16 x 16]  a0: row g, columns 2t 2t+1   a1: row g+8   a2: row g, columns +8   a3: both
//   B [16 x 8]   b0: column g, rows 2t 2t+1   b1: rows +8
//   C [16 x 8]   c0 c1: row g, columns 2t 2t+1   c2 c3: row g+8
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/arch/target.cuh"

namespace longspan::kernels::cuda::arch {

/// Address in the shared window, as ldmatrix and cp.async need it.
__device__ inline std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

/// From global to shared memory, asynchronously: the first `bytes` of kBytes (4, 8 or 16), then
/// zeros.
template <int kBytes>
__device__ inline void copy_async(std::uint32_t to, const void* from, int bytes) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from),
                 "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;\n" ::"r"(to), "l"(from),
                 "n"(kBytes), "r"(bytes)
                 : "memory");
  }
}

/// 16 bytes; zeros, and no read, if not `valid`.
__device__ inline void copy_async(std::uint32_t to, const void* from, bool valid) {
  copy_async<16>(to, from, valid ? 16 : 0);
}

__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

/// Returns when at most kPending of this thread's committed groups are still in flight.
template <int kPending>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

/// To shared memory; the address is a multiple of the size.
__device__ inline void store_shared(std::uint32_t to, const uint4& words) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};\n" ::"r"(to), "r"(words.x), "r"(words.y),
               "r"(words.z), "r"(words.w)
               : "memory");
}
__device__ inline void store_shared(std::uint32_t to, std::uint32_t word) {
  asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(to), "r"(word) : "memory");
}

/// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void load_matrices(std::uint32_t (&r)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

/// The same, each matrix transposed.
__device__ inline void load_matrices_transposed(std::uint32_t (&r)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

/// An 8x8 matrix of 16-bit elements across the warp, transposed: lane 4 g + t gives elements 2t and
/// 2t + 1 of row g, and gets those of column g.
__device__ inline std::uint32_t transpose_matrix(std::uint32_t row) {
  std::uint32_t column;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(column) : "r"(row));
  return column;
}

/// c += a b, fp32 accumulation; T is the type of a and b.
template <class T>
__device__ inline void mma(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                           std::uint32_t b1) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

/// Two floats rounded to nearest even, `low` in the low half.
template <class T>
__device__ inline std::uint32_t pack(float low, float high) {
  std::uint32_t packed;
  if constexpr (std::is_same_v<T, __half>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

/// Four fp8 numbers to fp16, exactly: the first two, the other two. An instruction of sm_89 and
/// later: code for other targets may name this, but must not run it.
template <bool kE5M2>
__device__ inline void widen_fp8(std::uint32_t four, std::uint32_t& low, std::uint32_t& high) {
  if constexpr (kTarget < 890)
    __trap();
  else if constexpr (kE5M2)
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\n"
        "cvt.rn.f16x2.e5m2x2 %0, l;\ncvt.rn.f16x2.e5m2x2 %1, h;\n}\n"
        : "=r"(low), "=r"(high)
        : "r"(four));
  else
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}\n"
        : "=r"(low), "=r"(high)
        : "r"(four));
}

/// Bytes of dynamic shared memory of the launch.
__device__ inline int dynamic_shared_bytes() {
  int bytes;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
  return bytes;
}

/// 2^x to 2 ulp; exp2(-inf) = 0, NaN stays NaN.
__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace longspan::kernels::cuda::arch
