// Attention whose rows end where they are computed, without a state and a merge, or are sent to the
// other ranks from there.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/dispatch/attend.hpp"
#include "kernels/exchange.hpp"

namespace longspan::kernels::cuda {

/// Queues attend and merge for a single rank's keys, if the kernel for long queries can write the
/// result itself; the short sequences of the batch still use states. Rows that start from a state
/// (p.resume) end in the same way, whatever share of the keys these are. Otherwise returns false,
/// and nothing is queued.
bool attend_finished(const AttendParams& p, const MergeParams& m, const Gpu& gpu,
                     cudaStream_t stream);

/// Whether attend_finished takes a call whose keys are still arriving (p.arrivals).
bool takes_arrivals(const AttendParams& p, const MergeParams& m, const Gpu& gpu);

/// Queues attend and exchange if all sequences are short, their keys are split and the size calls
/// for one trip: the fold of the splits then pushes the states. Otherwise returns false, and
/// nothing is queued.
bool attend_exchanged(const AttendParams& p, const ExchangeParams& e, const Gpu& gpu,
                      cudaStream_t stream);

/// Whether a call with these new_k and new_v writes them into the cache itself: decode does, for
/// rows whose elements are adjacent.
bool writes_new_keys(const AttendParams& p, const Gpu& gpu);

/// Whether attend_exchanged is meant for calls like this one, the same on all ranks, though some
/// may have too few keys for it. All sequences are short, and each of their rows has one state, of
/// this call's keys.
bool is_decode(const AttendParams& p);

}  // namespace longspan::kernels::cuda
