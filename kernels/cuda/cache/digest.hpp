// The kernels with which ranks compare their arguments, for host code.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/digest.hpp"

namespace longspan::kernels::cuda {

void digest(const DigestParams& params, cudaStream_t stream);
void write_run_digest(const RunDigestParams& params, cudaStream_t stream);

}  // namespace longspan::kernels::cuda
