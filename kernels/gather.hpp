// Attention of long queries over pages, by way of a copy: the keys and values of each sequence are
// brought together first, and the fastest kernel for contiguous keys does the rest. The copy is a
// few percent of the work where queries are many.
#pragma once

#include <cstddef>

#include "kernels/params.hpp"

namespace longspan::kernels {

struct GatheredParams {
  AttendParams attend;  // over pages, on one rank that holds all keys
  Rows new_k;           // [tokens, kv_heads, dim] the last q_len keys of each sequence, which the
  Rows new_v;           // pages then need not hold; null: all are in the pages
  MergeParams merge;    // out and lse; no state is read
  std::byte* room = nullptr;  // Backend::gather_room bytes
  std::size_t room_bytes = 0;
};

}  // namespace longspan::kernels
