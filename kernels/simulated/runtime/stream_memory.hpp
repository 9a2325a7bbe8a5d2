// Words that streams write and wait for.
#pragma once

#include <cuda.h>

namespace longspan::simulated {

/// The driver's cuStreamBatchMemOp, for writes of 32 bits and waits of 64 bits for a value at least
/// as great.
CUresult CUDAAPI simulated_stream_batch(CUstream stream, unsigned count,
                                        CUstreamBatchMemOpParams* operations, unsigned flags);

}  // namespace longspan::simulated
