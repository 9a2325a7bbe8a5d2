// The host side of backward on Hopper: which instances serve a call.
#include <algorithm>
#include <string>

#include "kernels/cuda/hopper/gradients_sm90.hpp"
#include "kernels/cuda/hopper/gradients_sm90_wide.hpp"
#include "longspan/error.hpp"

namespace longspan::kernels::sm90 {

void load_gradients() {
  GradientInstances<false, false>::load();
  GradientInstances<true, false>::load();
  GradientInstances<true, true>::load();
  load_wide_gradients();
}

void attend_gradients(const GradientParams& p, CUstream_st* stream) {
  if (p.scratch_bytes < kGradientScratch)
    throw InputError("attend_gradients needs " + std::to_string(kGradientScratch) +
                     " bytes of scratch and was given " + std::to_string(p.scratch_bytes));
  if (std::max(p.head_dim, p.value_dim) > kWidestScored) return attend_wide_gradients(p, stream);
  if (p.dropout) return GradientInstances<true, true>::launch(p, stream);
  if (p.bias || p.score.softcap != 0.0f) return GradientInstances<true, false>::launch(p, stream);
  GradientInstances<false, false>::launch(p, stream);
}

}  // namespace longspan::kernels::sm90
