// Attention of new queries over a cache and over new keys that need not be in the cache, on one
// rank. Each sequence is split into the keys in its pages and the new ones.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/params.hpp"

namespace longspan::kernels {

class Backend;

struct ContextParams {
  AttendParams cached;  // over the pages, into slot 0; shard: rank 0 of 2 (ContextCutParams)
  AttendParams fresh;   // over the new keys, one sequence after another, into slot 1; rank 1
  std::int64_t* key_start = nullptr;  // [batch] starts of the new keys, to be filled; null: one
                                      // sequence
  MergeParams merge;                  // of both slots
  std::byte* room = nullptr;          // ServingKernels::context_room bytes, or none
  std::size_t room_bytes = 0;
};

/// Attends to both parts with a state for each, and merges the states.
void attend_context_by_states(const Backend& backend, const ContextParams& params, Stream stream);

}  // namespace longspan::kernels
