// Attention whose rows end where they are computed, without a state and a merge, or go to the other
// ranks from there.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/dispatch/attend.hpp"
#include "kernels/exchange.hpp"

namespace longspan::kernels::cuda {

/// Queues attend and merge of a single rank's keys where the kernel for long queries can write the
/// result itself; the short sequences of the batch still go through their states. Rows that begin
/// from a state (p.resume) end in the same way, whatever share of the keys these are. Returns false
/// where that is not so, and nothing is queued.
bool attend_finished(const AttendParams& p, const MergeParams& m, const Gpu& gpu,
                     cudaStream_t stream);

/// Whether attend_finished takes a call whose keys still come (p.arrivals).
bool takes_arrivals(const AttendParams& p, const MergeParams& m, const Gpu& gpu);

/// Queues attend and exchange where all sequences are short, their keys are split and one trip is
/// what the size asks for: the fold of the splits then pushes the states. Returns false where that
/// is not so, and nothing is queued.
bool attend_exchanged(const AttendParams& p, const ExchangeParams& e, const Gpu& gpu,
                      cudaStream_t stream);

/// Whether a call with these new_k and new_v writes them into the cache itself: decode does, over
/// rows that lie together.
bool writes_new_keys(const AttendParams& p, const Gpu& gpu);

/// Whether attend_exchanged is for calls like this one, on all ranks alike, though some may have
/// too few keys for it. All sequences are short, and each of their rows has one state, of this
/// call's keys.
bool is_decode(const AttendParams& p);

}  // namespace longspan::kernels::cuda
