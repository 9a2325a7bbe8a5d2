// Hopper's own instructions as plain functions: the warpgroup matrix product (wgmma) and the
// register reallocation between warpgroups. Nothing here depends on attention. Everything needs the
// target sm_90a.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/arch/divide.cuh"
#include "kernels/cuda/arch/tma.cuh"

namespace longspan::kernels::sm90 {

using namespace cuda::arch;

/// Orders this thread's ordinary shared-memory stores before later reads by wgmma and TMA.
__device__ inline void fence_shared_stores() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- bytes and matrices ----------------------------------------------------------------------

/// Four floats to e4m3, rounded to the nearest, saturating; x0 in the lowest byte.
__device__ inline std::uint32_t pack_e4m3(float x0, float x1, float x2, float x3) {
  std::uint32_t packed;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}\n"
      : "=r"(packed)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return packed;
}

/// The reverse of load_matrices: lane 4 g + t holds elements 2t and 2t + 1 of row g of each.
__device__ inline void store_matrices(std::uint32_t address, const std::uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};\n" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// ---- registers -------------------------------------------------------------------------------

template <int kRegisters>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- wgmma: D[64, N] += A[64, K] B[K, N], fp32 accumulators, asynchronous ---------------------
//
// K is 32 bytes: 16 elements of 16 bits, or 32 of e4m3.
//
// A thread's share of D (and of a 16-bit A, in pairs) is that of mma.m16n8: in warp w of the four,
// lane 4 g + t holds in d[4 j + 2 h + e] the element of row 16 w + g + 8 h, column 8 j + 2 t + e.
// Of an 8-bit A it holds in byte e of a[2 j + h] that of row 16 w + g + 8 h, column 16 j + 4 t + e.

/// Operands in shared memory use the 128-byte swizzle, in panels of 128 bytes: rows of a panel 128
/// bytes apart, panels `panel_bytes` apart, all aligned to 1024 bytes.
__device__ inline std::uint64_t operand(const void* tile, int panel_bytes) {
  constexpr std::uint64_t kSwizzle128 = std::uint64_t{1} << 62;
  constexpr std::uint64_t kEightRows = std::uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kEightRows | static_cast<std::uint64_t>(panel_bytes >> 4) << 16 |
         (shared_address(tile) & 0x3ffff) >> 4;
}
/// The operand that starts `bytes` further on.
__device__ inline std::uint64_t advance(std::uint64_t operand, int bytes) {
  return operand + (bytes >> 4);
}

/// The same operand, opaque to the compiler: it cannot compute all its steps before a loop and hold
/// them in registers.
__device__ inline std::uint64_t opaque(std::uint64_t operand) {
  asm volatile("" : "+l"(operand));
  return operand;
}

/// Call it before the first product, and after registers that products read or write were changed.
__device__ inline void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
/// Closes a group of products.
__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until at most kPending groups, the newest, are still running.
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// Keeps the compiler from moving uses of the registers across this point.
template <int kCount>
__device__ inline void pin(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

/// The contents of the registers are dead, so the compiler need not keep them until they are
/// written. It emits no instruction.
template <int kCount>
__device__ inline void forget(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "=f"(registers[i]));
}

/// The same number, but the compiler does not know its value.
__device__ inline int opaque(int number) {
  asm volatile("" : "+r"(number));
  return number;
}

template <int kColumns>
struct Product;

// The instruction names each accumulator, so each width is written out. %0 ... are the
// accumulators; the operands' numbers follow them and are macro arguments.
#define LONGSPAN_R8_0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define LONGSPAN_R8_1 "%8,%9,%10,%11,%12,%13,%14,%15"
#define LONGSPAN_R8_2 "%16,%17,%18,%19,%20,%21,%22,%23"
#define LONGSPAN_R8_3 "%24,%25,%26,%27,%28,%29,%30,%31"
#define LONGSPAN_R8_4 "%32,%33,%34,%35,%36,%37,%38,%39"
#define LONGSPAN_R8_5 "%40,%41,%42,%43,%44,%45,%46,%47"
#define LONGSPAN_R8_6 "%48,%49,%50,%51,%52,%53,%54,%55"
#define LONGSPAN_R8_7 "%56,%57,%58,%59,%60,%61,%62,%63"
#define LONGSPAN_R8_8 "%64,%65,%66,%67,%68,%69,%70,%71"
#define LONGSPAN_R8_9 "%72,%73,%74,%75,%76,%77,%78,%79"
#define LONGSPAN_R8_10 "%80,%81,%82,%83,%84,%85,%86,%87"
#define LONGSPAN_R8_11 "%88,%89,%90,%91,%92,%93,%94,%95"
#define LONGSPAN_R8_12 "%96,%97,%98,%99,%100,%101,%102,%103"
#define LONGSPAN_R8_13 "%104,%105,%106,%107,%108,%109,%110,%111"
#define LONGSPAN_R8_14 "%112,%113,%114,%115,%116,%117,%118,%119"
#define LONGSPAN_R8_15 "%120,%121,%122,%123,%124,%125,%126,%127"
#define LONGSPAN_R24 LONGSPAN_R8_0 "," LONGSPAN_R8_1 "," LONGSPAN_R8_2
#define LONGSPAN_R32 LONGSPAN_R24 "," LONGSPAN_R8_3
#define LONGSPAN_R36 LONGSPAN_R32 ",%32,%33,%34,%35"
#define LONGSPAN_R40 LONGSPAN_R32 "," LONGSPAN_R8_4
#define LONGSPAN_R44 LONGSPAN_R40 ",%40,%41,%42,%43"
#define LONGSPAN_R48 LONGSPAN_R40 "," LONGSPAN_R8_5
#define LONGSPAN_R56 LONGSPAN_R48 "," LONGSPAN_R8_6
#define LONGSPAN_R64 LONGSPAN_R56 "," LONGSPAN_R8_7
#define LONGSPAN_R68 LONGSPAN_R64 ",%64,%65,%66,%67"
#define LONGSPAN_R72 LONGSPAN_R64 "," LONGSPAN_R8_8
#define LONGSPAN_R80 LONGSPAN_R72 "," LONGSPAN_R8_9
#define LONGSPAN_R88 LONGSPAN_R80 "," LONGSPAN_R8_10
#define LONGSPAN_R96 LONGSPAN_R88 "," LONGSPAN_R8_11
#define LONGSPAN_R128 \
  LONGSPAN_R96 "," LONGSPAN_R8_12 "," LONGSPAN_R8_13 "," LONGSPAN_R8_14 "," LONGSPAN_R8_15

#define LONGSPAN_D8(i)                                                                        \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define LONGSPAN_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define LONGSPAN_D24 LONGSPAN_D8(0), LONGSPAN_D8(8), LONGSPAN_D8(16)
#define LONGSPAN_D32 LONGSPAN_D24, LONGSPAN_D8(24)
#define LONGSPAN_D36 LONGSPAN_D32, LONGSPAN_D4(32)
#define LONGSPAN_D40 LONGSPAN_D32, LONGSPAN_D8(32)
#define LONGSPAN_D44 LONGSPAN_D40, LONGSPAN_D4(40)
#define LONGSPAN_D48 LONGSPAN_D40, LONGSPAN_D8(40)
#define LONGSPAN_D56 LONGSPAN_D48, LONGSPAN_D8(48)
#define LONGSPAN_D64 LONGSPAN_D56, LONGSPAN_D8(56)
#define LONGSPAN_D68 LONGSPAN_D64, LONGSPAN_D4(64)
#define LONGSPAN_D72 LONGSPAN_D64, LONGSPAN_D8(64)
#define LONGSPAN_D80 LONGSPAN_D72, LONGSPAN_D8(72)
#define LONGSPAN_D88 LONGSPAN_D80, LONGSPAN_D8(80)
#define LONGSPAN_D96 LONGSPAN_D88, LONGSPAN_D8(88)
#define LONGSPAN_D128 \
  LONGSPAN_D96, LONGSPAN_D8(96), LONGSPAN_D8(104), LONGSPAN_D8(112), LONGSPAN_D8(120)

#define LONGSPAN_SHARED_A(type, n, registers, outputs, x0, x1, x2, x3)                        \
  asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, " x2                                   \
               ", 0;\n"                                                                       \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" registers \
               "}, " x0 ", " x1 ", keep, 1, 1, 0, " x3 ";\n}\n"                               \
               : outputs                                                                      \
               : "l"(a), "l"(b), "r"(int{add}), "n"(kTransposed))
#define LONGSPAN_REGISTER_A(type, n, registers, outputs, x0, x1, x2, x3, x4, x5, x6)          \
  asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, " x5                                   \
               ", 0;\n"                                                                       \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" registers \
               "}, {" x0 "," x1 "," x2 "," x3 "}, " x4 ", keep, 1, 1, " x6 ";\n}\n"           \
               : outputs                                                                      \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int{add}),           \
                 "n"(kTransposed))

// The same for e4m3, which has no transposed operands.
#define LONGSPAN_SHARED_A8(n, registers, outputs, x0, x1, x2)                                  \
  asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, " x2                                    \
               ", 0;\n"                                                                        \
               "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" registers "}, " x0 \
               ", " x1 ", keep, 1, 1;\n}\n"                                                    \
               : outputs                                                                       \
               : "l"(a), "l"(b), "r"(int{add}))
#define LONGSPAN_REGISTER_A8(n, registers, outputs, x0, x1, x2, x3, x4, x5)                     \
  asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, " x5                                     \
               ", 0;\n"                                                                         \
               "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" registers "}, {" x0 \
               "," x1 "," x2 "," x3 "}, " x4 ", keep, 1, 1;\n}\n"                               \
               : outputs                                                                        \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int{add}))

template <class Element, bool kTransposed>
constexpr bool is_e4m3() {
  constexpr bool kIs = std::is_same_v<Element, __nv_fp8_e4m3>;
  static_assert(!kIs || !kTransposed, "8-bit operands lie with K innermost");
  return kIs;
}

// shared: A from shared memory. registers: A from registers. kTransposed: B is stored as [16, N]
// with N innermost (like V) instead of as [N, 16] (like K). add = false overwrites D.
#define LONGSPAN_PRODUCT(n, count, x0, x1, x2, x3, x4, x5, x6)                                     \
  template <>                                                                                      \
  struct Product<n> {                                                                              \
    template <class Element, bool kTransposed>                                                     \
    __device__ static void shared(float (&d)[count], std::uint64_t a, std::uint64_t b, bool add) { \
      if constexpr (is_e4m3<Element, kTransposed>())                                               \
        LONGSPAN_SHARED_A8(n, LONGSPAN_R##count, LONGSPAN_D##count, x0, x1, x2);                   \
      else if constexpr (std::is_same_v<Element, __half>)                                          \
        LONGSPAN_SHARED_A("f16", n, LONGSPAN_R##count, LONGSPAN_D##count, x0, x1, x2, x3);         \
      else                                                                                         \
        LONGSPAN_SHARED_A("bf16", n, LONGSPAN_R##count, LONGSPAN_D##count, x0, x1, x2, x3);        \
    }                                                                                              \
    template <class Element, bool kTransposed>                                                     \
    __device__ static void registers(float (&d)[count], const std::uint32_t (&a)[4],               \
                                     std::uint64_t b, bool add) {                                  \
      if constexpr (is_e4m3<Element, kTransposed>())                                               \
        LONGSPAN_REGISTER_A8(n, LONGSPAN_R##count, LONGSPAN_D##count, x0, x1, x2, x3, x4, x5);     \
      else if constexpr (std::is_same_v<Element, __half>)                                          \
        LONGSPAN_REGISTER_A("f16", n, LONGSPAN_R##count, LONGSPAN_D##count, x0, x1, x2, x3, x4,    \
                            x5, x6);                                                               \
      else                                                                                         \
        LONGSPAN_REGISTER_A("bf16", n, LONGSPAN_R##count, LONGSPAN_D##count, x0, x1, x2, x3, x4,   \
                            x5, x6);                                                               \
    }                                                                                              \
  };

LONGSPAN_PRODUCT(48, 24, "%24", "%25", "%26", "%27", "%28", "%29", "%30")
LONGSPAN_PRODUCT(64, 32, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
LONGSPAN_PRODUCT(72, 36, "%36", "%37", "%38", "%39", "%40", "%41", "%42")
LONGSPAN_PRODUCT(80, 40, "%40", "%41", "%42", "%43", "%44", "%45", "%46")
LONGSPAN_PRODUCT(88, 44, "%44", "%45", "%46", "%47", "%48", "%49", "%50")
LONGSPAN_PRODUCT(96, 48, "%48", "%49", "%50", "%51", "%52", "%53", "%54")
LONGSPAN_PRODUCT(112, 56, "%56", "%57", "%58", "%59", "%60", "%61", "%62")
LONGSPAN_PRODUCT(128, 64, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
LONGSPAN_PRODUCT(136, 68, "%68", "%69", "%70", "%71", "%72", "%73", "%74")
LONGSPAN_PRODUCT(160, 80, "%80", "%81", "%82", "%83", "%84", "%85", "%86")
LONGSPAN_PRODUCT(192, 96, "%96", "%97", "%98", "%99", "%100", "%101", "%102")
LONGSPAN_PRODUCT(256, 128, "%128", "%129", "%130", "%131", "%132", "%133", "%134")

// D[64, 16] += A B, both from shared memory. B is stored as [16 columns, K] with K innermost.
// kTransposed: A is stored as [K, 64] with its rows innermost (like V) instead of as [64, K].
#define LONGSPAN_NARROW(type)                                                        \
  asm volatile(                                                                      \
      "{\n.reg .pred keep;\nsetp.ne.b32 keep, %10, 0;\n"                             \
      "wgmma.mma_async.sync.aligned.m64n16k16.f32." type "." type " {" LONGSPAN_R8_0 \
      "}, %8, %9, keep, 1, 1, %11, 0;\n}\n"                                          \
      : LONGSPAN_D8(0)                                                               \
      : "l"(a), "l"(b), "r"(int{add}), "n"(kTransposed))
template <class Element, bool kTransposed>
__device__ inline void multiply_16(float (&d)[8], std::uint64_t a, std::uint64_t b, bool add) {
  if constexpr (std::is_same_v<Element, __half>)
    LONGSPAN_NARROW("f16");
  else
    LONGSPAN_NARROW("bf16");
}
#undef LONGSPAN_NARROW

#undef LONGSPAN_PRODUCT
#undef LONGSPAN_REGISTER_A8
#undef LONGSPAN_SHARED_A8
#undef LONGSPAN_REGISTER_A
#undef LONGSPAN_SHARED_A

}  // namespace longspan::kernels::sm90
