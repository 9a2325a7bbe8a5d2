// The declarations that nvcc provides to every .cu file, for g++: this header is included before
// each (-include), as nvcc includes cuda_runtime.h. It has qualifiers, the built-in variables of
// the running thread, warp and block operations, atomics, and the intrinsics that CUDA's headers
// have only for devices.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <math.h>  // isfinite and the like without std::

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

#include "kernels/simulated/thread.hpp"

// ---- qualifiers --------------------------------------------------------------------------------

#undef __global__
#undef __device__
#undef __host__
#undef __constant__
#undef __shared__
#undef __launch_bounds__
#undef __grid_constant__
#undef __forceinline__
#undef __noinline__
#undef __restrict__
#define __global__
#define __device__
#define __host__
#define __constant__
#define __launch_bounds__(...)
#define __grid_constant__
// No attribute: libstdc++ spells its own attribute with this name.
#define __noinline__
#define __forceinline__ inline
#define __restrict__ __restrict
// A process has many blocks: their variables come from arch/shared.cuh.
#define __shared__ static_assert_use_arch_shared

// ---- the running thread ------------------------------------------------------------------------

/// Set by the machine whenever it switches threads.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
inline constexpr int warpSize = 32;

// nvcc has these in the global namespace.
using std::isfinite, std::isinf, std::isnan;

// ---- blocks and warps --------------------------------------------------------------------------

namespace longspan::simulated::builtins {

template <class T>
concept Scalar = std::is_trivially_copyable_v<T> &&
    (sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 2);

inline void nothing(void* const (&)[32], unsigned) {}

/// A lane's input to a shuffle, and its output.
template <class T>
struct Shuffled {
  T value, result;
  int from;  // lane
  Site site;
};

template <class T>
void shuffle_lanes(void* const (&lanes)[32], unsigned mask) {
  for (int l = 0; l < 32; ++l) {
    if ((mask >> l & 1) == 0 || lanes[l] == nullptr) continue;
    auto& own = *static_cast<Shuffled<T>*>(lanes[l]);
    if (lanes[own.from] == nullptr)
      fail("a shuffle: lane " + std::to_string(l) + " asks lane " + std::to_string(own.from) +
               ", which takes no part",
           own.site);
    own.result = static_cast<Shuffled<T>*>(lanes[own.from])->value;
  }
}

/// `source`: a function of the lane's index in its section of `width` lanes; beyond the section,
/// the lane itself.
template <Scalar T, class Source>
T shuffle(unsigned mask, const char* what, T value, int width, const Source& source, Site site) {
  if (width < 1 || width > 32 || !std::has_single_bit(static_cast<unsigned>(width)))
    fail(std::string(what) + ": a width of " + std::to_string(width), site);
  const int own = lane(), section = own & ~(width - 1), in_section = source(own - section);
  const bool inside = in_section >= 0 && in_section < width;
  Shuffled<T> brought{value, value, inside ? section + in_section : own, site};
  meet(mask, what, &brought, shuffle_lanes<T>, false, site);
  return brought.result;
}

/// Combines all lanes' values into one, which every lane gets.
template <class T, auto kCombine>
T combine(unsigned mask, const char* what, T value, Site site) {
  meet(
      mask, what, &value,
      [](void* const(&lanes)[32], unsigned of) {
        T all{};
        bool any = false;
        for (int l = 0; l < 32; ++l) {
          if ((of >> l & 1) == 0 || lanes[l] == nullptr) continue;
          const T own = *static_cast<T*>(lanes[l]);
          all = any ? kCombine(all, own) : own;
          any = true;
        }
        for (int l = 0; l < 32; ++l)
          if ((of >> l & 1) != 0 && lanes[l] != nullptr) *static_cast<T*>(lanes[l]) = all;
      },
      false, site);
  return value;
}

template <class T>
inline constexpr auto kLeast = [](T a, T b) { return a < b ? a : b; };
template <class T>
inline constexpr auto kMost = [](T a, T b) { return a > b ? a : b; };
template <class T>
inline constexpr auto kSum = [](T a, T b) { return static_cast<T>(a + b); };
inline constexpr auto kOr = [](unsigned a, unsigned b) { return a | b; };
inline constexpr auto kAnd = [](unsigned a, unsigned b) { return a & b; };

}  // namespace longspan::simulated::builtins

using longspan::simulated::Site;

inline void __syncthreads(Site site = Site::current()) {
  longspan::simulated::block_barrier(0, 0, true, false, "__syncthreads", site);
}
inline int __syncthreads_or(int predicate, Site site = Site::current()) {
  return longspan::simulated::block_barrier(0, 0, true, predicate != 0, "__syncthreads_or", site);
}
inline void __syncwarp(unsigned mask = 0xffffffff, Site site = Site::current()) {
  longspan::simulated::meet(mask, "__syncwarp", nullptr, longspan::simulated::builtins::nothing,
                            true, site);
}

template <class T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32, Site site = Site::current()) {
  return longspan::simulated::builtins::shuffle(
      mask, "__shfl_sync", value, width, [&](int) { return from & (width - 1); }, site);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, Site site = Site::current()) {
  return longspan::simulated::builtins::shuffle(
      mask, "__shfl_xor_sync", value, width, [&](int own) { return own ^ bits; }, site);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32, Site site = Site::current()) {
  return longspan::simulated::builtins::shuffle(
      mask, "__shfl_up_sync", value, width, [&](int own) { return own - static_cast<int>(by); },
      site);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32,
                   Site site = Site::current()) {
  return longspan::simulated::builtins::shuffle(
      mask, "__shfl_down_sync", value, width, [&](int own) { return own + static_cast<int>(by); },
      site);
}

inline int __any_sync(unsigned mask, int predicate, Site site = Site::current()) {
  using namespace longspan::simulated::builtins;
  return combine<unsigned, kOr>(mask, "__any_sync", predicate != 0, site) != 0;
}
inline int __all_sync(unsigned mask, int predicate, Site site = Site::current()) {
  using namespace longspan::simulated::builtins;
  return combine<unsigned, kAnd>(mask, "__all_sync", predicate != 0, site) != 0;
}
inline unsigned __ballot_sync(unsigned mask, int predicate, Site site = Site::current()) {
  using namespace longspan::simulated::builtins;
  const unsigned bit = predicate != 0 ? 1u << longspan::simulated::lane() : 0u;
  return combine<unsigned, kOr>(mask, "__ballot_sync", bit, site);
}
template <class T>
requires std::is_same_v<T, int> || std::is_same_v<T, unsigned> T
__reduce_min_sync(unsigned mask, T value, Site site = Site::current()) {
  using namespace longspan::simulated::builtins;
  return combine<T, kLeast<T>>(mask, "__reduce_min_sync", value, site);
}
template <class T>
requires std::is_same_v<T, int> || std::is_same_v<T, unsigned> T
__reduce_max_sync(unsigned mask, T value, Site site = Site::current()) {
  using namespace longspan::simulated::builtins;
  return combine<T, kMost<T>>(mask, "__reduce_max_sync", value, site);
}
template <class T>
requires std::is_same_v<T, int> || std::is_same_v<T, unsigned> T
__reduce_add_sync(unsigned mask, T value, Site site = Site::current()) {
  using namespace longspan::simulated::builtins;
  return combine<T, kSum<T>>(mask, "__reduce_add_sync", value, site);
}

/// Lanes of a warp need not run together, so each may be the only active one.
inline unsigned __activemask() { return 1u << longspan::simulated::lane(); }

// ---- atomics -----------------------------------------------------------------------------------

// Only one thread runs at a time, but other processes may share the memory. Do not rely on any
// order that an atomic access does not give.

namespace longspan::simulated::builtins {

template <class T>
T exchange_if(T* at, T expected, T desired, Site site) {
  may_yield(site);
  if (reinterpret_cast<std::uintptr_t>(at) % sizeof(T) != 0)
    fail("an atomic access whose address is not a multiple of its size", site);
  __atomic_compare_exchange_n(at, &expected, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}

template <class T, class Change>
T change(T* at, const Change& changed, Site site) {
  may_yield(site);
  if (reinterpret_cast<std::uintptr_t>(at) % sizeof(T) != 0)
    fail("an atomic access whose address is not a multiple of its size", site);
  T before;
  __atomic_load(at, &before, __ATOMIC_RELAXED);
  for (;;) {
    T after = changed(before);
    if (__atomic_compare_exchange(at, &before, &after, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
      return before;
  }
}

}  // namespace longspan::simulated::builtins

template <class T>
requires std::is_arithmetic_v<T> T atomicAdd(T* at, std::type_identity_t<T> value,
                                             Site site = Site::current()) {
  return longspan::simulated::builtins::change(
      at, [&](T before) { return static_cast<T>(before + value); }, site);
}
template <std::integral T>
T atomicOr(T* at, std::type_identity_t<T> value, Site site = Site::current()) {
  return longspan::simulated::builtins::change(
      at, [&](T before) { return static_cast<T>(before | value); }, site);
}
template <std::integral T>
T atomicMin(T* at, std::type_identity_t<T> value, Site site = Site::current()) {
  return longspan::simulated::builtins::change(
      at, [&](T before) { return before < value ? before : value; }, site);
}
template <std::integral T>
T atomicMax(T* at, std::type_identity_t<T> value, Site site = Site::current()) {
  return longspan::simulated::builtins::change(
      at, [&](T before) { return before > value ? before : value; }, site);
}
template <class T>
requires std::is_arithmetic_v<T> T atomicExch(T* at, std::type_identity_t<T> value,
                                              Site site = Site::current()) {
  return longspan::simulated::builtins::change(
      at, [&](T) { return value; }, site);
}
inline unsigned atomicInc(unsigned* at, unsigned last, Site site = Site::current()) {
  return longspan::simulated::builtins::change(
      at, [&](unsigned before) { return before >= last ? 0u : before + 1; }, site);
}
template <std::integral T>
T atomicCAS(T* at, std::type_identity_t<T> expected, std::type_identity_t<T> desired,
            Site site = Site::current()) {
  return longspan::simulated::builtins::exchange_if<T>(at, expected, desired, site);
}
template <std::integral T>
T atomicCAS_system(T* at, std::type_identity_t<T> expected, std::type_identity_t<T> desired,
                   Site site = Site::current()) {
  return longspan::simulated::builtins::exchange_if<T>(at, expected, desired, site);
}

// ---- memory ------------------------------------------------------------------------------------

inline void __threadfence(Site site = Site::current()) { longspan::simulated::may_yield(site); }
inline void __threadfence_block(Site site = Site::current()) {
  longspan::simulated::may_yield(site);
}
inline void __threadfence_system(Site site = Site::current()) {
  longspan::simulated::fence_words(site);
}

namespace longspan::simulated::builtins {

template <class T>
void check_aligned(const T* at, Site site) {
  constexpr std::size_t kAlign = sizeof(T) < 16 ? sizeof(T) : 16;
  if (reinterpret_cast<std::uintptr_t>(at) % kAlign != 0)
    fail("a load or store whose address is not a multiple of its size", site);
}

}  // namespace longspan::simulated::builtins

template <class T>
T __ldg(const T* from, Site site = Site::current()) {
  longspan::simulated::builtins::check_aligned(from, site);
  return *from;
}
template <class T>
T __ldcg(const T* from, Site site = Site::current()) {
  longspan::simulated::builtins::check_aligned(from, site);
  return *from;
}
template <class T>
T __ldcs(const T* from, Site site = Site::current()) {
  longspan::simulated::builtins::check_aligned(from, site);
  return *from;
}
template <class T>
void __stcs(T* to, std::type_identity_t<T> value, Site site = Site::current()) {
  longspan::simulated::builtins::check_aligned(to, site);
  *to = value;
}
template <class T>
void __stcg(T* to, std::type_identity_t<T> value, Site site = Site::current()) {
  longspan::simulated::builtins::check_aligned(to, site);
  *to = value;
}

// ---- numbers -----------------------------------------------------------------------------------

inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }

// Each is rounded separately: builds have -ffp-contract=off.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }

inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return std::countl_zero(static_cast<unsigned long long>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }

/// Byte i of the result is the byte of (high, low) that nibble i names; its bit 3 spreads the sign.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const std::uint64_t both = low | static_cast<std::uint64_t>(high) << 32;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned nibble = selector >> 4 * i & 0xf;
    const auto byte = static_cast<std::uint8_t>(both >> 8 * (nibble & 7));
    const unsigned taken = (nibble & 8) == 0 ? byte : byte >> 7 != 0 ? 0xffu : 0u;
    result |= taken << 8 * i;
  }
  return result;
}
/// All ones in each half in which a and b are the same.
inline unsigned __vcmpeq2(unsigned a, unsigned b) {
  const unsigned differ = a ^ b;
  return ((differ & 0xffff) == 0 ? 0xffffu : 0u) | (differ >> 16 == 0 ? 0xffff0000u : 0u);
}
inline int __vimax3_s32(int a, int b, int c) { return std::max({a, b, c}); }
inline int __vimin3_s32(int a, int b, int c) { return std::min({a, b, c}); }
inline unsigned __vimax3_u32(unsigned a, unsigned b, unsigned c) { return std::max({a, b, c}); }
inline unsigned __vimin3_u32(unsigned a, unsigned b, unsigned c) { return std::min({a, b, c}); }

// CUDA's min and max take two integers of different signs as unsigned, and of different sizes as
// the larger; of a number and NaN they return the number.
namespace longspan::simulated::builtins {

template <class A, class B>
using Common = std::common_type_t<A, B>;

template <class A, class B>
Common<A, B> least(A a, B b) {
  if constexpr (std::is_floating_point_v<Common<A, B>>)
    return std::fmin(static_cast<Common<A, B>>(a), static_cast<Common<A, B>>(b));
  else
    return static_cast<Common<A, B>>(a) < static_cast<Common<A, B>>(b)
               ? static_cast<Common<A, B>>(a)
               : static_cast<Common<A, B>>(b);
}
template <class A, class B>
Common<A, B> most(A a, B b) {
  if constexpr (std::is_floating_point_v<Common<A, B>>)
    return std::fmax(static_cast<Common<A, B>>(a), static_cast<Common<A, B>>(b));
  else
    return static_cast<Common<A, B>>(a) > static_cast<Common<A, B>>(b)
               ? static_cast<Common<A, B>>(a)
               : static_cast<Common<A, B>>(b);
}

}  // namespace longspan::simulated::builtins

template <class A, class B>
requires std::is_arithmetic_v<A> && std::is_arithmetic_v<B>
auto min(A a, B b) { return longspan::simulated::builtins::least(a, b); }
template <class A, class B>
requires std::is_arithmetic_v<A> && std::is_arithmetic_v<B>
auto max(A a, B b) { return longspan::simulated::builtins::most(a, b); }

// ---- the runtime -------------------------------------------------------------------------------

/// As cuda_runtime.h has it for nvcc: for kernels, which are usually templates.
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute attribute, int value) {
  return ::cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}
