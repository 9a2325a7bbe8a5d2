// Names the instruction sets that the host kernels are built for; the best one of the machine is
// chosen when they run. It is to be included before Highway. On x86 they are AVX-512 with the
// permutations of bytes of Ice Lake (AVX3_DL; tables for fp8) and without, AVX2, SSE4 and the plain
// baseline.
//
// Both AVX-512 and AVX2 give the same bits: every sum is either one chain in a given order or has a
// shape of 16 lanes, whatever the width of a vector. Below AVX2 there is no fused multiply-add, so
// the bits there are others (and again the same for SSE4 and the baseline).
#pragma once

// Highway builds for it only where it is asked to.
#define HWY_WANT_AVX3_DL 1

// These gain nothing over their neighbours, or have vectors of a length that is not known when
// compiling.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)

// Whether the target at hand has vectors of 512 bits and 32 registers of them.
#define LONGSPAN_HOST_AVX512 (HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL)
