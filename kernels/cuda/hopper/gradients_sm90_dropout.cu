// The instances of backward on Hopper with dropout, beside softcap and ALiBi.
#include "kernels/cuda/hopper/gradients_sm90_instances.cuh"

namespace longspan::kernels::sm90 {

template struct GradientInstances<true, true>;

}  // namespace longspan::kernels::sm90
