// The exchange kernels as host code sees them.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/exchange.hpp"

namespace longspan::kernels::cuda {

void exchange(const ExchangeParams& p, cudaStream_t stream);

/// Bytes of a window for exchanges of up to `rows` states.
std::size_t window_bytes(std::int64_t rows, int dim, int ranks);

/// The variant that `automatic` stands for.
Push choose_push(std::int64_t rows, int dim, int ranks);

}  // namespace longspan::kernels::cuda
