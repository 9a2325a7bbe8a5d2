// Hopper's own instructions in the simulator: the warpgroup matrix product (wgmma) and the register
// reallocation between warpgroups.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <limits>
#include <type_traits>

#include "kernels/cuda/arch/divide.cuh"
#include "kernels/cuda/arch/tma.cuh"

namespace longspan::kernels::sm90 {

using namespace cuda::arch;

/// Orders this thread's ordinary shared-memory stores before later reads by wgmma and TMA.
inline void fence_shared_stores(simulated::Site site = simulated::Site::current()) {
  simulated::fence_shared_proxy(site);
}

// ---- bytes and matrices ----------------------------------------------------------------------

/// Four floats to e4m3, rounded to the nearest, saturating; x0 in the lowest byte.
inline std::uint32_t pack_e4m3(float x0, float x1, float x2, float x3) {
  using simulated::e4m3_bits;
  return e4m3_bits(x0) | std::uint32_t{e4m3_bits(x1)} << 8 | std::uint32_t{e4m3_bits(x2)} << 16 |
         std::uint32_t{e4m3_bits(x3)} << 24;
}

/// The reverse of load_matrices: lane 4 g + t holds elements 2t and 2t + 1 of row g of each.
inline void store_matrices(std::uint32_t address, const std::uint32_t (&r)[4],
                           simulated::Site site = simulated::Site::current()) {
  std::byte* const to = simulated::shared_pointer(address, 16, 16, "stmatrix", site);
  std::uint32_t row[4] = {r[0], r[1], r[2], r[3]};
  simulated::fragments_to_rows(row, site);
  std::memcpy(to, row, 16);
}

// ---- registers -------------------------------------------------------------------------------

template <int kRegisters>
void give_registers(simulated::Site site = simulated::Site::current()) {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0);
  simulated::meet_warp("setmaxnreg.dec", site);
}
template <int kRegisters>
void take_registers(simulated::Site site = simulated::Site::current()) {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0);
  simulated::meet_warp("setmaxnreg.inc", site);
}

// ---- wgmma: D[64, N] += A[64, K] B[K, N], fp32 accumulators, asynchronous ---------------------

/// Operands in shared memory use the 128-byte swizzle, in panels of 128 bytes: rows of a panel 128
/// bytes apart, panels `panel_bytes` apart, all aligned to 1024 bytes.
inline std::uint64_t operand(const void* tile, int panel_bytes,
                             simulated::Site site = simulated::Site::current()) {
  return simulated::describe_operand(simulated::shared_address(tile, site), panel_bytes, site);
}
/// The operand that starts `bytes` further on.
inline std::uint64_t advance(std::uint64_t operand, int bytes,
                             simulated::Site site = simulated::Site::current()) {
  if (bytes % 16 != 0) simulated::fail("wgmma: operands begin at multiples of 16 bytes", site);
  return operand + static_cast<std::uint64_t>(bytes >> 4);
}

inline std::uint64_t opaque(std::uint64_t operand) { return operand; }

/// Call it before the first product, and after registers that products read or write were changed.
inline void wgmma_begin(simulated::Site site = simulated::Site::current()) {
  simulated::begin_products(site);
}
/// Closes a group of products.
inline void wgmma_commit(simulated::Site site = simulated::Site::current()) {
  simulated::commit_products(site);
}
/// Waits until at most kPending groups, the newest, are still running.
template <int kPending>
void wgmma_wait(simulated::Site site = simulated::Site::current()) {
  static_assert(kPending >= 0 && kPending <= 7);
  simulated::wait_products(kPending, site);
}

template <int kCount>
void pin(float (&)[kCount]) {}

/// A read of them nevertheless gives NaN.
template <int kCount>
void forget(float (&registers)[kCount]) {
  for (float& one : registers) one = std::numeric_limits<float>::quiet_NaN();
}

inline int opaque(int number) { return number; }

// shared: A from shared memory. registers: A from registers. kTransposed: B is stored as [16, N]
// with N innermost (like V) instead of as [N, 16] (like K). add = false overwrites D.
template <int kColumns>
struct Product {
  static_assert(kColumns >= 8 && kColumns <= 256 && kColumns % 8 == 0);

  template <class Element, bool kTransposed>
  static void shared(float (&d)[kColumns / 2], std::uint64_t a, std::uint64_t b, bool add,
                     simulated::Site site = simulated::Site::current()) {
    simulated::multiply_later(number<Element, kTransposed>(), kColumns, kTransposed, d, nullptr, a,
                              b, add, site);
  }
  template <class Element, bool kTransposed>
  static void registers(float (&d)[kColumns / 2], const std::uint32_t (&a)[4], std::uint64_t b,
                        bool add, simulated::Site site = simulated::Site::current()) {
    simulated::multiply_later(number<Element, kTransposed>(), kColumns, kTransposed, d, a, 0, b,
                              add, site);
  }

 private:
  template <class Element, bool kTransposed>
  static constexpr simulated::Number number() {
    if constexpr (std::is_same_v<Element, __nv_fp8_e4m3>) {
      static_assert(!kTransposed, "8-bit operands lie with K innermost");
      return simulated::Number::e4m3;
    } else if constexpr (std::is_same_v<Element, __half>) {
      return simulated::Number::fp16;
    } else {
      static_assert(std::is_same_v<Element, __nv_bfloat16>);
      return simulated::Number::bf16;
    }
  }
};

/// D[64, 16] += A B, both from shared memory. B is stored as [16 columns, K] with K innermost.
/// kTransposed: A is stored as [K, 64] with its rows innermost (like V) instead of as [64, K].
template <class Element, bool kTransposed>
void multiply_16(float (&d)[8], std::uint64_t a, std::uint64_t b, bool add,
                 simulated::Site site = simulated::Site::current()) {
  using simulated::Number;
  static_assert(std::is_same_v<Element, __half> || std::is_same_v<Element, __nv_bfloat16>);
  simulated::multiply_later(std::is_same_v<Element, __half> ? Number::fp16 : Number::bf16, 16,
                            false, d, nullptr, a, b, add, site, kTransposed);
}

}  // namespace longspan::kernels::sm90
