// Backward on Hopper, for host code: two kernels, of dq and of dk and dv. gradients_sm90.cuh has
// the method.
#pragma once

#include <cstddef>

#include "kernels/gradient_params.hpp"

struct CUstream_st;

namespace longspan::kernels::sm90 {

/// The widest head of queries, keys and values, and the narrowest of the wider of both.
inline constexpr int kWidestGradients = 256, kLeastGradients = 40;
/// The widest with fp16, softcap, ALiBi or dropout.
inline constexpr int kWidestScored = 128;

/// Whether the kernels can serve the call, where they run (rules.cpp). They support queries, keys,
/// values and gradients of results of one type of 16 bits, in rows at multiples of 16 bytes, heads
/// of 40 to 256 in steps of 8, layouts whose positions ascend, all masks, a positive scale,
/// softcap, dropout, and ALiBi as forward does. There must be no qq_bias, no gradients of slopes,
/// and no fixed order. Heads wider than kWidestScored are of bf16, with plain scores.
bool takes_gradients(const GradientParams& params);

/// Whether they also round and store its gradients: of a call that makes all three from zero, into
/// rows of its type at multiples of 8 bytes.
bool stores_gradients(const GradientParams& params);

/// Bytes of scratch that attend_gradients needs.
inline constexpr std::size_t kGradientScratch = 16;

/// Queues GradientKernels::attend_gradients for a call that the kernels accept.
void attend_gradients(const GradientParams& params, CUstream_st* stream);

/// Loads the code of the kernels (GradientKernels::load_gradients says why).
void load_gradients();

/// The kernels of heads up to kWidestScored for a kind of scores: with softcap and ALiBi, and with
/// dropout, where a call has them. Each kind has a file, so that they are compiled at the same
/// time.
template <bool kScored, bool kDrops>
struct GradientInstances {
  static void load();
  static void launch(const GradientParams& params, CUstream_st* stream);
};

}  // namespace longspan::kernels::sm90
