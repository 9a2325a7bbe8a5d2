// Brings keys and values out of pages together, as host code sees it.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/dispatch/attend.hpp"
#include "kernels/params.hpp"

namespace longspan::kernels::cuda {

/// Attention of long queries over pages, by way of a copy. The keys and values of each sequence are
/// brought together first, and the fastest kernel for contiguous keys does the rest. The copy is a
/// few percent of the work where queries are many.
struct GatheredParams {
  AttendParams attend;  // over pages, on one rank that holds all keys
  Rows new_k;           // [tokens, kv_heads, dim] the last q_len keys of each sequence, which the
  Rows new_v;           // pages then need not hold; null: all are in the pages
  MergeParams merge;    // out and lse; no state is read
  std::byte* room = nullptr;  // gather_room bytes
  std::size_t room_bytes = 0;
};

/// The bytes of GatheredParams::room for calls within these bounds; 0 where this way does not
/// serve.
std::size_t gather_room(const AttendParams& bounds, const Gpu& gpu);

/// Queues copy and attention. Where it returns false, nothing was done, and the caller takes the
/// way over the pages themselves.
bool attend_gathered(const GatheredParams& g, const Gpu& gpu, cudaStream_t stream);

/// The number of keys of each sequence that room of so many bytes has place for.
std::int64_t gather_capacity(const Geometry& p, std::size_t room_bytes);

/// Queues the copy. It writes keys [sequences, capacity, kv_heads, dim], values behind them, then
/// the first key of each sequence, [sequences], and a ticket that is zero. Keys that no row sees
/// are left out.
AttendParams gather_keys(const GatheredParams& g, cudaStream_t stream);

}  // namespace longspan::kernels::cuda
