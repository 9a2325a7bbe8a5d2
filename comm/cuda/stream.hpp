// Helpers for GPUs and their streams.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <string>

#include "comm/control/patience.hpp"
#include "longspan/types.hpp"

namespace longspan::comm {

inline cudaStream_t cuda(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

/// For people.
std::string name_of_gpu(int gpu);

/// UsageError for a GPU outside the `visible` ones; below 0 it is chosen later.
void check_gpu(int asked, int visible);

/// Queues the copy, unless both are the same place.
void copy_on(cudaStream_t stream, const void* from, void* to, std::size_t bytes);

/// Polls until the stream is done; `look` is called between polls and may throw.
void wait_for_stream(cudaStream_t stream, Patience& patient, const std::function<void()>& look);

}  // namespace longspan::comm
