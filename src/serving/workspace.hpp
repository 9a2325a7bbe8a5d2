// Lays out the workspace of a call of ServingOps, which the caller owns (docs/reference/memory.md).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/params.hpp"
#include "src/base/parts.hpp"

namespace longspan {

struct CallWorkspace {
  std::byte* states = nullptr;        // [slots] of StateSlots::bytes(rows, dim)
  std::byte* scratch = nullptr;       // AttentionKernels::attend_scratch
  std::int64_t* ranges = nullptr;     // [batch, 3], for context_attention only
  std::int64_t* key_start = nullptr;  // [batch], for context_attention and attend_state only
  std::byte* room = nullptr;          // ServingKernels::context_room, for context_attention only
  std::size_t scratch_bytes = 0;
  std::size_t room_bytes = 0;
  std::size_t bytes = 0;  // total

  static CallWorkspace lay_out(void* base, int slots, std::int64_t rows, int dim,
                               std::size_t scratch, int context_batch, std::size_t room = 0) {
    Parts parts{static_cast<std::byte*>(base)};
    CallWorkspace w;
    w.states = parts.take(slots * kernels::StateSlots::bytes(rows, dim));
    w.scratch = parts.take(scratch);
    w.scratch_bytes = scratch;
    w.ranges =
        reinterpret_cast<std::int64_t*>(parts.take(3 * sizeof(std::int64_t) * context_batch));
    w.key_start = reinterpret_cast<std::int64_t*>(parts.take(context_batch * sizeof(std::int64_t)));
    w.room = parts.take(room);
    w.room_bytes = room;
    w.bytes = parts.bytes;
    return w;
  }

  /// Lays out the workspace of attend_state, whose states are elsewhere.
  static CallWorkspace lay_out_scratch(void* base, std::size_t scratch, int batch) {
    Parts parts{static_cast<std::byte*>(base)};
    CallWorkspace w;
    w.scratch = parts.take(scratch);
    w.scratch_bytes = scratch;
    w.key_start = parts.take_array<std::int64_t>(static_cast<std::size_t>(batch));
    w.bytes = parts.bytes;
    return w;
  }
};

}  // namespace longspan
