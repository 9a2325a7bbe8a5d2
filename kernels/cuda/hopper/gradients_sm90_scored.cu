// The instances of backward on Hopper with softcap and ALiBi.
#include "kernels/cuda/hopper/gradients_sm90_instances.cuh"

namespace longspan::kernels::sm90 {

template struct GradientInstances<true, false>;

}  // namespace longspan::kernels::sm90
