// Backward on Hopper, for host code: two kernels, of dq and of dk and dv. gradients_sm90.cuh has
// the method.
#pragma once

#include <cstddef>

#include "kernels/gradient_params.hpp"

struct CUstream_st;

namespace longspan::kernels::sm90 {

/// The widest head of queries, keys and values, and the narrowest of the wider of both.
inline constexpr int kWidestGradients = 256, kLeastGradients = 40;

/// Whether the kernels can serve the call, where they run (rules.cpp). They support bf16 queries,
/// keys, values and gradients of results in rows at multiples of 16 bytes, heads of 40 to 256 in
/// steps of 8, layouts whose positions ascend, all masks, and a positive scale. There must be no
/// softcap, bias or dropout, and no fixed order.
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

}  // namespace longspan::kernels::sm90
