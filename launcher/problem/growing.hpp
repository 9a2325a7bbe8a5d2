// A cache that grows: its lengths, which a step increases, and its rows, which are filled from a
// block of random ones. The device does both, queued on a stream. So a captured graph grows by
// itself, and caches of many GB are filled at the speed of memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "longspan/shard.hpp"
#include "longspan/types.hpp"

namespace longspan::launcher {

/// The lengths of a batch.
struct Lengths {
  std::int32_t* whole = nullptr;  // [batch] keys of each sequence, on all ranks
  std::int32_t* own = nullptr;    // [batch] keys of each sequence on this rank
  int batch = 1;
  int tokens = 1;  // that a step adds to each sequence
  Shard shard;

  LONGSPAN_HD void grow(int b) const {
    whole[b] += tokens;
    own[b] = static_cast<std::int32_t>(shard.local_len(whole[b]));
  }
};

/// Maps a position to a row of a block of `rows`. From one pass over the block to the next the rows
/// shift by `twist`: with different twists for keys and values a pair does not repeat.
struct Pattern {
  std::int64_t rows = 1;
  std::int64_t first = 0;  // tells caches apart
  std::int64_t twist = 0;

  LONGSPAN_HD std::int64_t row(int b, std::int64_t position) const {
    constexpr std::int64_t kApart = 101;  // sequences
    return (first + b * kApart + position + position / rows * twist) % rows;
  }
};

/// Fills the keys or the values of a cache: `kv_len` of each sequence from the pattern, and NaN
/// (all bits set) in the room after them.
struct Filling {
  const std::byte* block = nullptr;  // [pattern.rows, row_bytes]
  Pattern pattern;
  std::int64_t row_bytes = 8;
  std::byte* cache = nullptr;  // [batch, capacity, row_bytes], or pages
  int batch = 1;
  std::int64_t capacity = 0;            // room for local keys of a sequence
  const std::int32_t* table = nullptr;  // [batch, capacity / page]; null: no pages
  int page = 1;                         // divides capacity
  Shard shard;
  std::int64_t kv_len = 0;

  /// The row of local key i of sequence b, with slot = b capacity + i.
  LONGSPAN_HD std::int64_t target(std::int64_t slot) const {
    return table == nullptr ? slot : std::int64_t{table[slot / page]} * page + slot % page;
  }
  /// The row of the block for that place; -1 for none.
  LONGSPAN_HD std::int64_t source(std::int64_t slot) const {
    const std::int64_t i = slot % capacity;
    if (i >= shard.local_len(kv_len)) return -1;
    return pattern.row(static_cast<int>(slot / capacity), shard.position(i, kv_len));
  }
};

/// Grow and fill. All pointers of a struct are to device memory. `threads` are the host's.
void grow(Device device, const Lengths& lengths, Stream stream);
void fill(Device device, const Filling& filling, int threads, Stream stream);

#if defined(LONGSPAN_HAVE_CUDA)
namespace cuda {
void grow(const Lengths& lengths, Stream stream);
void fill(const Filling& filling, Stream stream);
}  // namespace cuda
#endif

}  // namespace longspan::launcher
