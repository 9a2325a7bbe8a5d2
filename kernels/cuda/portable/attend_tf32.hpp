// The kernels of AttendParams::tf32, for the host's choice of kernels.
#pragma once

#include "kernels/cuda/dispatch/attend.hpp"

namespace longspan::kernels::cuda {

/// Returns the kernel for fp32 tensors with products of tf32, for short and long queries. One
/// instance of each dim supports what any Loader stands for.
KernelShape attend_fp32_tf32(int dim);

}  // namespace longspan::kernels::cuda
