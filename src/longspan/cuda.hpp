/// \file
/// Interop with CUDA: a stream as longspan's opaque Stream.
#pragma once

#include <cuda_runtime_api.h>

#include "longspan/types.hpp"

namespace longspan {

/// The stream as calls of longspan take it.
inline Stream as_stream(cudaStream_t stream) { return {stream}; }

}  // namespace longspan
