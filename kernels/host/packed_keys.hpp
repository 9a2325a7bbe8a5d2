// Keys and values that are packed before the tiles run. If several tiles read the keys of a head,
// each would pack all of them again. Rows of a head also lie apart in memory, so reading them there
// costs more than packing. The memory is limited: a round is the sequences and heads whose segments
// fit into it together. A round is packed, and then attended, before the next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "kernels/host/host.hpp"
#include "kernels/host/thread_pool.hpp"
#include "kernels/host/tile.hpp"

namespace longspan::kernels::host {

class PackedKeys {
 public:
  /// Heads [begin, end), counted over all sequences: b * kv_heads + head.
  struct Round {
    std::int64_t begin, end;
  };

  /// A sequence and kv head with fewer rows is one tile.
  static constexpr std::int64_t kLeastRows = kSmallTileRows + 1;
  /// For packed keys: in fp32 this holds one head of 65,536 keys of dim 128.
  static constexpr std::int64_t kMostBytes = 64 << 20;

  static std::size_t bytes(const Geometry& bounds);

  /// `has_tiles(s)` returns whether a sequence has several tiles per kv head. All such sequences
  /// are packed, except those too long for the memory and, in a run with products of bf16, those
  /// that do not use them.
  PackedKeys(const AttendParams& params, std::byte* memory,
             const std::function<bool(const Sequence&)>& has_tiles);

  /// The round that begins with head `begin`. It never ends at a sequence that is not packed.
  Round round(std::int64_t begin) const;

  /// Packs the keys of the round. wide(thread) is a Bf16Space's memory of that name; the pool's
  /// first thread calls `between` from time to time.
  void pack(ThreadPool& pool, Round round, const std::function<float*(int thread)>& wide,
            const BetweenTiles& between);

  /// The segments of the last packed round for a tile.
  PackedSegments of(const Tile& tile) const;

 private:
  std::int64_t segments(int b) const { return begin_[b + 1] - begin_[b]; }
  /// The segments of the heads before this one.
  std::int64_t segments_before(std::int64_t head) const;
  void pack(int b, std::int64_t segment, Round round, float* wide);

  const AttendParams& p_;
  const bool bf16_;        // as operands of bf16 products
  std::int64_t bytes_;     // of a segment
  std::int64_t capacity_;  // segments
  std::int64_t* begin_;    // [batch + 1] segments of a head in the sequences before
  std::int64_t* first_;    // [batch] the first local segment that some row sees
  std::byte* packed_;      // [capacity, bytes]
  std::uint8_t* finite_;   // [capacity]
  std::int64_t base_ = 0;  // segments before the round's first head
};

}  // namespace longspan::kernels::host
