// A tile is some query rows of one kv head (tokens times the group's heads), or few rows of each of
// several kv heads, on some leaves of the fixed order (order.hpp). One thread computes it at a
// time, with all of its memory in a TileSpace that stays in the core's cache. The shape of a tile
// does not change the bits of a row.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/params.hpp"

namespace longspan::kernels::host {

class KeyRows;  // key_rows.hpp

inline constexpr int kBlockRows = 6;   // rows that multiply keeps in registers
inline constexpr int kTileRows = 384;  // most rows of a tile; 144 where the cache is small
inline constexpr int kSmallTileRows = 144;
inline constexpr int kFewRows = 8;     // a tile of at most this many reads keys and values in place
inline constexpr int kLaneRows = 128;  // a tile of at most this many, if it packs for itself, has
                                       // rows in lanes (row_lanes-inl.hpp)
inline constexpr int kFewKeys = 32;    // most keys that such a tile reads of each head in turn
inline constexpr int kPanel = 64;      // columns of a packed panel
inline constexpr int kRowsAhead = 16;  // of prefetches of keys

/// The keys [begin, end) of one segment.
struct Range {
  int begin = 0;
  int end = 0;
};

/// One sequence of the batch as this rank sees it.
struct Sequence {
  int index;  // b
  Shard shard;
  std::int64_t first_row;    // of q
  std::int64_t query_len;    // on this rank
  std::int64_t context_len;  // position of its first query, on any rank
  std::int64_t kv_len;       // on all ranks
  std::int64_t first_key;
  std::int64_t keys;  // on this rank
  SegmentOrder order;

  Sequence(const Geometry& p, int b)
      : index(b),
        shard(p.shard.for_sequence(b)),
        first_row(p.batch.first_row(b)),
        query_len(p.batch.query_len(b, p.tokens)),
        context_len(p.first_position(b, p.batch.keys(b, p.shard))),
        kv_len(p.batch.keys(b, p.shard)),
        first_key(p.batch.first_key(b)),
        keys(shard.local_len(kv_len)),
        order(shard.order(kv_len)) {}
};

struct Tile {
  Sequence sequence;
  int kv_head, kv_heads;  // the first one, and their number: one, except for tiles of few rows
  std::int64_t first;  // of the sequence's rows of each kv head: token * group + head in the group
  int rows;            // of each kv head
  int first_leaf, last_leaf;  // leaves [first_leaf, last_leaf)
  Interval keys;              // local keys: all of the sequence's, or a part (KeyParts)

  int states() const { return rows * kv_heads; }
};

/// Whether tiles of few rows can read keys and values in place, without packing.
inline bool reads_in_place(const AttendParams& p) {
  return p.k.dense() && p.v.dense() && p.head_dim % 16 == 0 && p.value_dim % 16 == 0 &&
         !is_latent_row(p.kv_dtype);
}

/// A tile's memory. In o, value_dim is padded to 16, so that a vector never reads past a row.
struct TileSpace {
  int rows = 0;    // capacity
  int levels = 0;  // of the stack of states

  float* q = nullptr;        // [rows, head_dim]; with rows in lanes [rows / 16, head_dim, 16]
  float* scores = nullptr;   // [rows, 128], later weights
  float* segment = nullptr;  // keys [2, head_dim, 64], and then values [value_dim / 64, 128, 64];
                             // with rows in lanes, keys are as values
  float* o = nullptr;        // [levels, rows, padded value_dim]
  Stats* stats = nullptr;    // [levels, rows]

  static int padded(int dim) { return (dim + 15) / 16 * 16; }

  static std::int64_t panels(int value_dim) { return (value_dim + kPanel - 1) / kPanel; }

  static std::int64_t key_floats(const Geometry& p) { return std::int64_t{kSegment} * p.head_dim; }
  static std::int64_t segment_floats(const Geometry& p) {
    return key_floats(p) + kSegment * panels(p.value_dim) * kPanel;
  }

  /// The same where keys are packed as values are.
  static std::int64_t lane_floats(const Geometry& p) {
    return kSegment * (panels(p.head_dim) + panels(p.value_dim)) * kPanel;
  }
  static int whole_lanes(int rows) { return (rows + 15) / 16 * 16; }

  static std::size_t fixed_bytes(const Geometry& p) {  // with q and scores of rows up to 16 lanes
    return std::size_t{4} *
           (std::max(segment_floats(p), lane_floats(p)) + 15 * (p.head_dim + kSegment));
  }
  static std::size_t row_bytes(const Geometry& p, int levels) {
    return std::size_t{4} * (p.head_dim + kSegment) +
           levels * (std::size_t{4} * padded(p.value_dim) + sizeof(Stats));
  }
  static std::size_t bytes(const Geometry& p, int rows, int levels) {
    return fixed_bytes(p) + rows * row_bytes(p, levels);
  }

  TileSpace(std::byte* memory, const Geometry& p, int row_count, int level_count)
      : rows(row_count), levels(level_count) {
    float* at = reinterpret_cast<float*>(memory);
    const auto take = [&](std::int64_t floats) {
      float* part = at;
      at += floats;
      return part;
    };
    segment = take(std::max(segment_floats(p), lane_floats(p)));
    scores = take(std::int64_t{whole_lanes(rows)} * kSegment);
    o = take(std::int64_t{levels} * rows * padded(p.value_dim));
    q = take(std::int64_t{whole_lanes(rows)} * p.head_dim);
    stats = reinterpret_cast<Stats*>(at);
  }
};

/// Whether tiles of few rows, and so of several kv heads, can be read in place on this machine.
bool has_few_rows();

/// Segments of a kv head's keys that are already packed, for all tiles (PackedKeys); or none.
struct PackedSegments {
  const std::byte* data = nullptr;  // [segments, bytes]: the `segment` of a TileSpace or Bf16Space
  std::int64_t bytes = 0;
  const std::uint8_t* finite = nullptr;  // [segments] results of pack_bf16_segment
  std::int64_t first = 0;                // the first local segment

  explicit operator bool() const { return data != nullptr; }
  /// The index of the segment that begins with a local key.
  std::int64_t number(std::int64_t first_key) const { return first_key / kSegment - first; }
  template <class T>
  const T* at(std::int64_t first_key) const {
    return reinterpret_cast<const T*>(data + number(first_key) * bytes);
  }
};

/// Packs the keys `keys` of a segment whose rows are `rows`, and its values, into the `segment` of
/// a TileSpace.
void pack_segment(const AttendParams& params, const KeyRows& rows, Range keys, float* segment);

/// Leaves the state of the tile's rows in level 0 of the space. Without `packed` the tile packs for
/// itself.
void attend_tile(const AttendParams& params, const Tile& tile, const PackedSegments& packed,
                 const TileSpace& space);

/// a = fold(a, b) for each of `rows` rows; o is [rows, padded].
void fold_states(Stats* a_stats, float* a, const Stats* b_stats, const float* b, int rows,
                 int padded);

}  // namespace longspan::kernels::host
