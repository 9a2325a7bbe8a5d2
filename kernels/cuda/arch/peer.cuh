// Loads and stores shared with other GPUs, and the clock that bounds the waits for them.
#pragma once

#include <cstdint>

namespace longspan::kernels::cuda::arch {

/// Sixteen bytes at once, not cached in registers or L1. The memory system moves each aligned eight
/// bytes as a unit.
__device__ inline void store_volatile(void* to, uint4 value) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}
__device__ inline uint4 load_volatile(const void* from) {
  uint4 value;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from)
               : "memory");
  return value;
}

__device__ inline uint2 load_volatile_two(const void* from) {
  uint2 value;
  asm volatile("ld.volatile.global.v2.u32 {%0, %1}, [%2];"
               : "=r"(value.x), "=r"(value.y)
               : "l"(from)
               : "memory");
  return value;
}

/// The same for fewer bytes: each aligned four of them move as a unit.
__device__ inline void store_volatile(void* to, uint2 value) {
  asm volatile("st.volatile.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(value.x), "r"(value.y)
               : "memory");
}
__device__ inline void store_volatile(void* to, std::uint32_t value) {
  asm volatile("st.volatile.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

/// Eight bytes that move as a unit: an access to one word of 64 bits, unlike one to two of 32.
__device__ inline void store_whole(std::uint64_t* to, std::uint64_t value) {
  asm volatile("st.volatile.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
__device__ inline std::uint64_t load_whole(const std::uint64_t* from) {
  std::uint64_t value;
  asm volatile("ld.volatile.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

/// After this, writes that its writer, here or on another GPU, made before the word are visible.
__device__ inline std::uint64_t load_acquire(const std::uint64_t* from) {
  std::uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

/// Adds to a word. Earlier writes of this thread, and those that it has observed, are visible to
/// any thread that acquires the word.
__device__ inline void count_release(std::uint64_t* word, std::uint64_t more) {
  asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(word), "l"(more) : "memory");
}

/// Loads that leave `value` unchanged unless `wanted`: without a branch, so that several can be in
/// flight.
__device__ inline void load_volatile_if(bool wanted, const void* from, uint4& value) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.u32 p, %5, 0;\n"
      " @p ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "+r"(value.x), "+r"(value.y), "+r"(value.z), "+r"(value.w)
      : "l"(from), "r"(std::uint32_t{wanted})
      : "memory");
}
__device__ inline void load_volatile_if(bool wanted, const void* from, uint2& value) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.u32 p, %3, 0;\n"
      " @p ld.volatile.global.v2.u32 {%0, %1}, [%2];\n}"
      : "+r"(value.x), "+r"(value.y)
      : "l"(from), "r"(std::uint32_t{wanted})
      : "memory");
}
__device__ inline void load_volatile_if(bool wanted, const void* from, std::uint32_t& value) {
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n @p ld.volatile.global.u32 %0, [%1];\n}"
               : "+r"(value)
               : "l"(from), "r"(std::uint32_t{wanted})
               : "memory");
}

__device__ inline std::uint32_t load_relaxed(const std::uint32_t* word) {
  std::uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

/// For words of this GPU's memory that its other threads read concurrently.
__device__ inline void store_relaxed(std::uint32_t* word, std::uint32_t value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

/// Prefetches a line into L2; nothing depends on it.
__device__ inline void prefetch(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

__device__ inline std::uint64_t nanoseconds() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

}  // namespace longspan::kernels::cuda::arch
