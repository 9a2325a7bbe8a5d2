// Backward on Hopper of heads wider than 128, for gradients_sm90.cu.
#pragma once

#include "kernels/gradient_params.hpp"

struct CUstream_st;

namespace longspan::kernels::sm90 {

void attend_wide_gradients(const GradientParams& params, CUstream_st* stream);
void load_wide_gradients();

}  // namespace longspan::kernels::sm90
