// Flags in GPU memory that streams raise and wait for by themselves: no kernel waits, so none takes
// a place on the GPU beside the kernels that compute. (CUDA: stream memory operations.)
//
// A flag is a word of 64 bits. Its low half is 1 while it is raised, or the value that it was
// raised to. Its high half is 0 until the flag is freed: then it is the largest signed number, and
// no wait for the flag, or for a counter in its place, takes any time.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <initializer_list>
#include <span>

namespace longspan::comm {

struct FlagOperation {
  enum Kind { raise, lower, wait, free };
  Kind kind;
  std::byte* flag;     // 64 bits, aligned; of this GPU, or, for raise, of a reachable one
  unsigned value = 1;  // the value for raise
};

/// Queues operations, one after the other. Writes of a stream before it raises a flag are visible
/// to a stream that waited for the flag. A captured stream takes them into its graph. Throws
/// BackendError where the driver does not support them.
void queue_flags(cudaStream_t stream, std::span<const FlagOperation> operations);
inline void queue_flags(cudaStream_t stream, std::initializer_list<FlagOperation> operations) {
  queue_flags(stream, std::span(operations.begin(), operations.size()));
}

}  // namespace longspan::comm
