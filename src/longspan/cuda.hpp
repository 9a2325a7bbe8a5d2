/// \file
/// Interop with CUDA: a stream as longspan's opaque Stream.
#pragma once

#include <cuda_runtime_api.h>

#include "longspan/types.hpp"

namespace longspan {

/// The stream in the form that calls of longspan take.
inline Stream as_stream(cudaStream_t stream) { return {stream}; }

}  // namespace longspan
