// One allocation, laid out once when a layer is made; docs/workspace.md has the formula.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/params.hpp"

namespace longspan {

struct Workspace {
  std::byte* states = nullptr;        // [ranks] slots of StateSlots::bytes(rows, dim)
  std::byte* scratch = nullptr;       // Backend::attend_scratch
  std::int64_t* key_start = nullptr;  // [max_batch]
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
  static Workspace lay_out(std::byte* base, const Sizes& sizes, std::size_t& bytes) {
    bytes = 0;
    const auto take = [&](std::size_t size) {
      std::byte* part = base ? base + bytes : nullptr;
      bytes += (size + 255) / 256 * 256;
      return part;
    };
    Workspace w;
    w.states = take(sizes.ranks * kernels::StateSlots::bytes(sizes.rows(), sizes.dim));
    w.scratch = take(sizes.scratch);
    w.key_start = reinterpret_cast<std::int64_t*>(take(sizes.max_batch * sizeof(std::int64_t)));
    if (sizes.shard_queries) {
      const std::int64_t rows = sizes.ranks * sizes.max_tokens;
      w.gathered = take(rows * sizes.row_bytes);
      w.ordered = take(rows * sizes.row_bytes);
      w.row_map = reinterpret_cast<std::int64_t*>(take(rows * sizeof(std::int64_t)));
    }
    return w;
  }
};

}  // namespace longspan
