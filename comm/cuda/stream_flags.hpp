// Flags in GPU memory that streams raise and wait for by themselves: no kernel waits, so none needs
// a place on the GPU beside the kernels that compute. (CUDA calls it stream memory operations.)
//
// A flag is a word of 64 bits. Its low half is 1 while it is raised, or what it was raised to. Its
// high half is 0 until somebody frees the flag: then it is as large as a number with a sign can be,
// and no wait for the flag, or for a counter in its place, takes any time.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <initializer_list>
#include <span>

namespace longspan::comm {

struct FlagOperation {
  enum Kind { raise, lower, wait, free };
  Kind kind;
  std::byte* flag;     // 64 bits, aligned; of this GPU, or, for raise, of one that it reaches
  unsigned value = 1;  // that raise gives it
};

/// Queues operations, one after the other. What a stream writes before it raises a flag is seen by
/// whoever waited for the flag. A stream that is captured takes them into its graph. Throws
/// BackendError where the driver cannot.
void queue_flags(cudaStream_t stream, std::span<const FlagOperation> operations);
inline void queue_flags(cudaStream_t stream, std::initializer_list<FlagOperation> operations) {
  queue_flags(stream, std::span(operations.begin(), operations.size()));
}

}  // namespace longspan::comm
