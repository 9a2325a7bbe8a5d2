// The instructions of sm_80 and later that the portable kernels use, in the simulator: mma.sync,
// ldmatrix, cp.async, ex2.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>

#include "kernels/cuda/arch/target.cuh"
#include "kernels/simulated/numbers.hpp"
#include "kernels/simulated/tensor_core.hpp"
#include "kernels/simulated/thread.hpp"

namespace longspan::kernels::cuda::arch {

/// Address in the shared window, as ldmatrix and cp.async need it.
inline std::uint32_t shared_address(const void* pointer,
                                    simulated::Site site = simulated::Site::current()) {
  return simulated::shared_address(pointer, site);
}

/// From global to shared memory, asynchronously: the first `bytes` of kBytes (4, 8 or 16), then
/// zeros.
template <int kBytes>
void copy_async(std::uint32_t to, const void* from, int bytes,
                simulated::Site site = simulated::Site::current()) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  if (bytes < 0 || bytes > kBytes)
    simulated::fail(
        "cp.async of " + std::to_string(bytes) + " bytes out of " + std::to_string(kBytes), site);
  if (reinterpret_cast<std::uintptr_t>(from) % kBytes != 0)
    simulated::fail("cp.async from an address that is not a multiple of its size", site);
  simulated::shared_pointer(to, kBytes, kBytes, "cp.async", site);
  simulated::copy_async(to, from, kBytes, bytes, site);
}

/// 16 bytes; zeros, and no read, if not `valid`.
inline void copy_async(std::uint32_t to, const void* from, bool valid,
                       simulated::Site site = simulated::Site::current()) {
  copy_async<16>(to, from, valid ? 16 : 0, site);
}

inline void commit_copies() { simulated::commit_copies(); }

/// Returns when at most kPending of this thread's committed groups are still in flight.
template <int kPending>
void wait_copies(simulated::Site site = simulated::Site::current()) {
  simulated::wait_copies(kPending, site);
}

/// To shared memory; the address is a multiple of the size.
inline void store_shared(std::uint32_t to, const uint4& words,
                         simulated::Site site = simulated::Site::current()) {
  std::memcpy(simulated::shared_pointer(to, 16, 16, "st.shared.v4", site), &words, 16);
}
inline void store_shared(std::uint32_t to, std::uint32_t word,
                         simulated::Site site = simulated::Site::current()) {
  std::memcpy(simulated::shared_pointer(to, 4, 4, "st.shared", site), &word, 4);
}

// A lane reads, or writes, the row that it names, and then the warp exchanges elements. Each access
// thus belongs to the same thread as its neighbours in program order.

/// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
inline void load_matrices(std::uint32_t (&r)[4], std::uint32_t address,
                          simulated::Site site = simulated::Site::current()) {
  std::memcpy(r, simulated::shared_pointer(address, 16, 16, "ldmatrix", site), 16);
  simulated::rows_to_fragments(r, false, site);
}

/// The same, each matrix transposed.
inline void load_matrices_transposed(std::uint32_t (&r)[4], std::uint32_t address,
                                     simulated::Site site = simulated::Site::current()) {
  std::memcpy(r, simulated::shared_pointer(address, 16, 16, "ldmatrix.trans", site), 16);
  simulated::rows_to_fragments(r, true, site);
}

/// An 8x8 matrix of 16-bit elements across the warp, transposed: lane 4 g + t gives elements 2t and
/// 2t + 1 of row g, and gets those of column g.
inline std::uint32_t transpose_matrix(std::uint32_t row,
                                      simulated::Site site = simulated::Site::current()) {
  return simulated::transpose_fragment(row, site);
}

/// c += a b, fp32 accumulation; T is the type of a and b.
template <class T>
void mma(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1,
         simulated::Site site = simulated::Site::current()) {
  constexpr bool kHalf = std::is_same_v<T, __half>;
  static_assert(kHalf || std::is_same_v<T, __nv_bfloat16>);
  simulated::multiply(kHalf ? simulated::Number::fp16 : simulated::Number::bf16, c, a, b0, b1,
                      site);
}

/// Two floats rounded to nearest even, `low` in the low half.
template <class T>
std::uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<T, __half>)
    return simulated::fp16_bits(low) | std::uint32_t{simulated::fp16_bits(high)} << 16;
  else
    return simulated::bf16_bits(low) | std::uint32_t{simulated::bf16_bits(high)} << 16;
}

/// Four fp8 numbers to fp16, exactly: the first two, the other two.
template <bool kE5M2>
void widen_fp8(std::uint32_t four, std::uint32_t& low, std::uint32_t& high,
               simulated::Site site = simulated::Site::current()) {
  if constexpr (kTarget < 890) simulated::fail("GPUs before sm_89 do not widen fp8", site);
  const auto widen = [&](int byte) {
    const auto bits = static_cast<std::uint8_t>(four >> 8 * byte);
    return std::uint32_t{kE5M2 ? simulated::fp16_of_e5m2(bits) : simulated::fp16_of_e4m3(bits)};
  };
  low = widen(0) | widen(1) << 16;
  high = widen(2) | widen(3) << 16;
}

/// Bytes of dynamic shared memory of the launch.
inline int dynamic_shared_bytes() { return simulated::dynamic_shared_bytes(); }

/// 2^x to 2 ulp; exp2(-inf) = 0, NaN stays NaN. Subnormals count as 0, before and after.
inline float exp2_fast(float x) {
  const float y = std::exp2(x);
  return y < std::numeric_limits<float>::min() ? 0.0f : y;
}

}  // namespace longspan::kernels::cuda::arch
