// Memory of a layer (one allocation, laid out once when the layer is made) and of a call of Kernels
// (the caller's); docs/workspace.md has the formulas.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/params.hpp"

namespace longspan {

/// Hands out the parts of the memory at `base`, each aligned to 256 bytes. A null base only counts.
struct Parts {
  std::byte* base = nullptr;
  std::size_t bytes = 0;

  std::byte* take(std::size_t size) {
    std::byte* part = base ? base + bytes : nullptr;
    bytes += (size + 255) / 256 * 256;
    return part;
  }
};

struct LayerWorkspace {
  std::byte* states = nullptr;        // [ranks] slots of StateSlots::bytes(rows, dim)
  std::byte* scratch = nullptr;       // Backend::attend_scratch
  std::int64_t* key_start = nullptr;  // [max_batch]
  std::uint64_t* said = nullptr;      // [ranks] what each says of its run (RunHeaders)
  // With sharded queries only:
  std::byte* gathered = nullptr;    // [ranks, max_tokens, row_bytes]
  std::byte* ordered = nullptr;     // [ranks * max_tokens, row_bytes]
  std::int64_t* row_map = nullptr;  // [ranks, max_tokens]

  struct Sizes {
    std::int64_t ranks, max_tokens, max_batch, heads, dim, row_bytes;
    std::size_t scratch;
    bool shard_queries;

    /// Most rows of states: (token, head).
    std::int64_t rows() const { return max_tokens * (shard_queries ? ranks : 1) * heads; }
  };

  /// The parts of the memory at `base`; `bytes` becomes what they take. A null base only counts.
  static LayerWorkspace lay_out(std::byte* base, const Sizes& sizes, std::size_t& bytes) {
    Parts parts{base};
    LayerWorkspace w;
    w.states = parts.take(sizes.ranks * kernels::StateSlots::bytes(sizes.rows(), sizes.dim));
    w.scratch = parts.take(sizes.scratch);
    w.key_start =
        reinterpret_cast<std::int64_t*>(parts.take(sizes.max_batch * sizeof(std::int64_t)));
    w.said = reinterpret_cast<std::uint64_t*>(parts.take(sizes.ranks * sizeof(std::uint64_t)));
    if (sizes.shard_queries) {
      const std::int64_t rows = sizes.ranks * sizes.max_tokens;
      w.gathered = parts.take(rows * sizes.row_bytes);
      w.ordered = parts.take(rows * sizes.row_bytes);
      w.row_map = reinterpret_cast<std::int64_t*>(parts.take(rows * sizeof(std::int64_t)));
    }
    bytes = parts.bytes;
    return w;
  }
};

struct CallWorkspace {
  std::byte* states = nullptr;        // [slots] of StateSlots::bytes(rows, dim)
  std::byte* scratch = nullptr;       // Backend::attend_scratch
  std::int64_t* ranges = nullptr;     // [batch, 3]: context_attention only
  std::int64_t* key_start = nullptr;  // [batch]: context_attention only
  std::byte* room = nullptr;          // Backend::gather_room: context_attention only
  std::size_t scratch_bytes = 0;
  std::size_t room_bytes = 0;
  std::size_t bytes = 0;  // in all

  static CallWorkspace lay_out(void* base, int slots, std::int64_t rows, int dim,
                               std::size_t scratch, int context_batch, std::size_t room = 0) {
    Parts parts{static_cast<std::byte*>(base)};
    CallWorkspace w;
    w.states = parts.take(slots * kernels::StateSlots::bytes(rows, dim));
    w.scratch = parts.take(scratch);
    w.scratch_bytes = scratch;
    w.ranges =
        reinterpret_cast<std::int64_t*>(parts.take(context_batch * 3 * sizeof(std::int64_t)));
    w.key_start = reinterpret_cast<std::int64_t*>(parts.take(context_batch * sizeof(std::int64_t)));
    w.room = parts.take(room);
    w.room_bytes = room;
    w.bytes = parts.bytes;
    return w;
  }
};

}  // namespace longspan
