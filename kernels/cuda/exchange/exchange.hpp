// The exchange kernels, for host code.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/exchange.hpp"
#include "kernels/row_puts.hpp"

namespace longspan::kernels::cuda {

struct WorkPlan;

void exchange(const ExchangeParams& p, cudaStream_t stream);

/// The same for states that are still in pieces, the splits of one launch of short queries only
/// (WorkPlan::parts): they fold on the way. The variant must be one-trip. The same data travels as
/// with `exchange`, so ranks may mix the two. `multiprocessors` is their number on this GPU.
void exchange_parts(const WorkPlan& plan, const ExchangeParams& p, int multiprocessors,
                    cudaStream_t stream);

/// `multiprocessors` is their number on this GPU, of which few are used beside an attention.
void put_rows(const RowPuts& puts, int multiprocessors, cudaStream_t stream);

/// The variant that runs. Throws for params that cannot be exchanged.
Push push_of(const ExchangeParams& p);

/// The bytes of a peer buffer for exchanges of up to `rows` states.
std::size_t peer_buffer_bytes(std::int64_t rows, int dim, int ranks);

/// The variant that `automatic` stands for; `pushed` is that of ExchangeParams.
Push choose_push(std::int64_t rows, int dim, int ranks, bool pushed = false);

}  // namespace longspan::kernels::cuda
