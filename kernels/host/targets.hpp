// The instruction sets that the host kernels are built for; the best one of the machine is chosen
// at run time. Include this before Highway. On x86 they are AVX-512 with the byte permutations of
// Ice Lake (AVX3_DL; tables for fp8) and without, AVX2 and the plain baseline. A build for one
// machine leaves out those that it lacks (LONGSPAN_HOST_TARGETS in CMakeLists.txt).
//
// AVX-512 and AVX2 give the same bits: every sum is either one chain in a given order or has a
// shape of 16 lanes, whatever the vector width. The baseline has no fused multiply-add, so its bits
// differ.
#pragma once

// Highway builds for it only on request.
#define HWY_WANT_AVX3_DL 1

// These bring no gain over their neighbours, are of CPUs without AVX2 (from before 2013), or have
// vectors whose length is not known at compile time.
#define HWY_DISABLED_TARGETS                                                          \
  (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV | \
   LONGSPAN_HOST_LACKS)
#if defined(LONGSPAN_HOST_LACKS_AVX3)
#define LONGSPAN_HOST_LACKS (HWY_AVX3 | HWY_AVX3_DL)
#elif defined(LONGSPAN_HOST_LACKS_AVX3_DL)
#define LONGSPAN_HOST_LACKS HWY_AVX3_DL
#else
#define LONGSPAN_HOST_LACKS 0
#endif

// Whether the current target has vectors of 512 bits and 32 registers of them.
#define LONGSPAN_HOST_AVX512 (HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL)

// Whether the current target reads keys and values of few rows in place (few_rows-inl.hpp). The
// baseline of x86 is not worth the time to compile, and the scalar target has no blocks of lanes to
// transpose in. They pack as for many rows, with the same bits.
#define LONGSPAN_HOST_FEW_ROWS \
  (HWY_TARGET != HWY_SCALAR && (LONGSPAN_HOST_AVX512 || HWY_TARGET == HWY_AVX2 || !HWY_ARCH_X86))
