// The kernels of AttendParams::tf32, as the host's choice of kernels sees them.
#pragma once

#include "kernels/cuda/dispatch/attend.hpp"

namespace longspan::kernels::cuda {

/// Gives the kernel for fp32 tensors with products of tf32, for short and long queries. One
/// instance of each dim takes whatever any Loader stands for.
KernelShape attend_fp32_tf32(int dim);

}  // namespace longspan::kernels::cuda
