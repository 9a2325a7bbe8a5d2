// Which kernels serve the long queries of a call on the current GPU.
#pragma once

#include "kernels/cuda/dispatch/attend.hpp"
#include "kernels/cuda/dispatch/families.hpp"

namespace longspan::test {

inline const kernels::cuda::CudaFamily& family_of_long(const kernels::AttendParams& params) {
  const kernels::cuda::Gpu gpu = kernels::cuda::current_gpu();
  return serving(params, kind_of(params, kernels::cuda::Lengths::only_long, gpu));
}

inline bool is_on_hopper(const kernels::AttendParams& params) {
  return is_of_hopper(family_of_long(params).id);
}

}  // namespace longspan::test
