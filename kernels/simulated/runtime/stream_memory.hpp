// Words that streams write and wait for by themselves.
#pragma once

#include <cuda.h>

namespace longspan::simulated {

/// The driver's cuStreamBatchMemOp, for writes of 32 bits and waits for 64 that are as great.
CUresult CUDAAPI simulated_stream_batch(CUstream stream, unsigned count,
                                        CUstreamBatchMemOpParams* operations, unsigned flags);

}  // namespace longspan::simulated
