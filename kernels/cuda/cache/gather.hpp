// Gathers keys and values from pages, for host code.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/dispatch/attend.hpp"
#include "kernels/params.hpp"

namespace longspan::kernels::cuda {

/// Attention of long queries over pages, through a copy. The keys and values of each sequence are
/// gathered first, and the fastest kernel for contiguous keys does the rest. With many queries the
/// copy is a few percent of the work.
struct GatheredParams {
  AttendParams attend;  // over pages, on one rank that holds all keys
  Rows new_k;           // [tokens, kv_heads, dim] the last q_len keys of each sequence, which need
                        // not
  Rows new_v;           // be in the pages then; null: all are in the pages
  MergeParams merge;    // out and lse; no state is read
  std::byte* room = nullptr;  // gather_room bytes
  std::size_t room_bytes = 0;
};

/// The bytes of GatheredParams::room for calls within these bounds; 0 if this method does not
/// apply.
std::size_t gather_room(const AttendParams& bounds, const Gpu& gpu);

/// Queues copy and attention. If it returns false, nothing was done, and the caller attends to the
/// pages directly.
bool attend_gathered(const GatheredParams& g, const Gpu& gpu, cudaStream_t stream);

/// The number of keys of each sequence that fit memory of `room_bytes`.
std::int64_t gather_capacity(const Geometry& p, std::size_t room_bytes);

/// Queues the copy. It writes keys [sequences, capacity, kv_heads, dim], then the values, then the
/// first key of each sequence, [sequences], and a ticket that is zero. Keys that no row sees are
/// left out.
AttendParams gather_keys(const GatheredParams& g, cudaStream_t stream);

}  // namespace longspan::kernels::cuda
