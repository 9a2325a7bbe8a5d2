// The instances of backward on Hopper for plain scores.
#include "kernels/cuda/hopper/gradients_sm90_instances.cuh"

namespace longspan::kernels::sm90 {

template struct GradientInstances<false, false>;

}  // namespace longspan::kernels::sm90
