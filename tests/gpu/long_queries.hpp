// Which kernels serve the queries of a call on the current GPU.
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

/// Whether a kernel for latent keys serves the short queries of a call.
inline bool is_latent(const kernels::AttendParams& params) {
  const kernels::cuda::Gpu gpu = kernels::cuda::current_gpu();
  return is_of_mla(serving(params, kind_of(params, kernels::cuda::kinds(params)[0], gpu)).id);
}

}  // namespace longspan::test
