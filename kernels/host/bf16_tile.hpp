// A tile whose products are the processor's own, of bf16: Q K^T and P V on AMX, with the scores,
// the softmax and all sums in fp32 and the weights rounded to bf16 (DTypes::bf16_products). It has
// one kv head and more rows than a tile of fp32, since they share what is packed.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/host/tile.hpp"

// Whether the compiler has the instructions.
#if defined(__x86_64__) && defined(__linux__) && \
    ((defined(__clang__) && __clang_major__ >= 12) || (!defined(__clang__) && __GNUC__ >= 11))
#define LONGSPAN_COMPILES_AMX 1
#else
#define LONGSPAN_COMPILES_AMX 0
#endif

namespace longspan::kernels::host {

inline constexpr int kBf16Rows = 768;      // most rows of a tile
inline constexpr int kBf16BlockRows = 32;  // rows that are computed together
inline constexpr int kBf16Queries = 9;     // a sequence of fewer keeps the products of fp32

/// Whether this machine has the products, the kernels are built for them, and the system allows it.
bool has_bf16_products();

/// Whether the rows of a sequence take them: by the length of its own queries, on all ranks.
inline bool takes_bf16_products(const Geometry& p, int b) {
  return p.bf16_products && p.dtype == DType::bf16 && p.whole_query_len(b) >= kBf16Queries &&
         has_bf16_products();
}

/// A tile's memory. Operands of products lie in tiles of 1 KB, of 16 rows: rows by 32 of the depth
/// on the left, 16 pairs of the depth by 16 columns on the right. Dims are padded with zeros.
struct Bf16Space {
  using Element = std::uint16_t;
  static constexpr int kTile = 512;  // elements

  int rows = 0;                // capacity, a multiple of kBf16BlockRows
  Element* q = nullptr;        // [rows / 16, depth, 16, 32]
  Element* k = nullptr;        // [8, depth, 16, 16, 2], 16 keys each
  Element* v = nullptr;        // [4, padded value_dim / 16, 16, 16, 2], 32 keys each
  Element* mended = nullptr;   // as v
  Element* weights = nullptr;  // [2][2, 4, 16, 32], of two blocks of rows
  float* scores = nullptr;     // [2][32, 128]
  float* leaf = nullptr;       // [32, padded value_dim], where a block's leaf folds at once
  float* wide = nullptr;       // keys, and then values, in fp32 panels (pack-inl.hpp)
  float* o = nullptr;          // [levels, rows, padded value_dim]
  Stats* stats = nullptr;      // [levels, rows]

  static int depth(const Geometry& p) { return (p.head_dim + 31) / 32; }
  static int columns(const Geometry& p) { return TileSpace::padded(p.value_dim) / 16; }

  static std::size_t fixed_bytes(const Geometry& p) {
    const std::size_t tiles = 8 * depth(p) + 2 * 4 * columns(p) + 2 * 8;
    const std::size_t panels =
        std::max<std::size_t>(p.head_dim, TileSpace::panels(p.value_dim) * std::size_t{kPanel});
    return tiles * kTile * sizeof(Element) + 4 * kSegment * (2 * kBf16BlockRows + panels) +
           4 * kBf16BlockRows * TileSpace::padded(p.value_dim);
  }
  static std::size_t row_bytes(const Geometry& p, int levels) {
    return depth(p) * 32 * sizeof(Element) +
           levels * (4 * TileSpace::padded(p.value_dim) + sizeof(Stats));
  }
  static std::size_t bytes(const Geometry& p, int rows, int levels) {
    return fixed_bytes(p) + rows * row_bytes(p, levels);
  }

  Bf16Space(std::byte* memory, const Geometry& p, int row_count, int levels) : rows(row_count) {
    const auto take = [&]<class T>(T*& part, std::int64_t count) {
      part = reinterpret_cast<T*>(memory);
      memory += count * static_cast<std::int64_t>(sizeof(T));
    };
    const std::int64_t tile = kTile, capacity = rows;
    take(k, 8 * depth(p) * tile);
    take(v, 4 * columns(p) * tile);
    take(mended, 4 * columns(p) * tile);
    take(weights, 2 * 8 * tile);
    take(scores, std::int64_t{2} * kBf16BlockRows * kSegment);
    take(leaf, std::int64_t{kBf16BlockRows} * TileSpace::padded(p.value_dim));
    take(wide,
         kSegment * std::max<std::int64_t>(p.head_dim, TileSpace::panels(p.value_dim) * kPanel));
    take(q, capacity * depth(p) * 32);
    take(o, levels * capacity * TileSpace::padded(p.value_dim));
    take(stats, levels * capacity);
  }
};

/// Leaves the state of the tile's rows in level 0 of the space. Only where has_bf16_products().
void attend_bf16_tile(const AttendParams& params, const Tile& tile, const Bf16Space& space);

}  // namespace longspan::kernels::host
