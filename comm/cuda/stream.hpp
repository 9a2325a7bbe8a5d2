// Small things about the current GPU and its streams.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <string>

#include "comm/control/patience.hpp"
#include "longspan/types.hpp"

namespace longspan::comm {

inline cudaStream_t cuda(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

/// Of the thread's current GPU, for people.
std::string gpu_name();

/// Queues the copy, unless both are one place.
void copy_on(cudaStream_t stream, const void* from, void* to, std::size_t bytes);

/// Polls until the stream is done; `look` is called between polls and may throw.
void wait_for_stream(cudaStream_t stream, Patience& patient, const std::function<void()>& look);

}  // namespace longspan::comm
