// A tile with the CPU's own products of bf16: Q K^T and P V on AMX, with the scores, the softmax
// and all sums in fp32 and the weights rounded to bf16 (DTypes::bf16_products). It has one kv head
// and more rows than a tile of fp32, since they share the packed operands.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/host/tile.hpp"

// Whether the compiler has the instructions: those of AMX, and AVX-512 BF16 (gradient_tile.hpp).
#if defined(__x86_64__) && defined(__linux__) && \
    ((defined(__clang__) && __clang_major__ >= 12) || (!defined(__clang__) && __GNUC__ >= 11))
#define LONGSPAN_COMPILES_AMX 1
#else
#define LONGSPAN_COMPILES_AMX 0
#endif
#define LONGSPAN_COMPILES_AVX512_BF16 LONGSPAN_COMPILES_AMX  // compilers had it earlier

namespace longspan::kernels::host {

inline constexpr int kBf16Rows = 512;      // most rows of a tile
inline constexpr int kBf16BlockRows = 32;  // rows that are computed together
inline constexpr int kBf16Queries = 9;     // a sequence with fewer keeps the products of fp32

/// Whether the CPU has AVX-512 BF16: conversions to bf16, and products of pairs.
bool has_avx512_bf16();

/// Whether this machine has the products, the kernels are built for them, and the system allows it.
bool has_bf16_products();

/// A tile's memory. Operands of products are stored in tiles of 1 KB, of 16 rows: rows by 32 of the
/// depth on the left, 16 pairs of the depth by 16 columns on the right. Dims are padded with zeros.
struct Bf16Space {
  using Element = std::uint16_t;
  static constexpr int kTile = 512;  // elements

  int rows = 0;                // capacity, a multiple of kBf16BlockRows
  Element* q = nullptr;        // [rows / 16, depth, 16, 32]
  Element* segment = nullptr;  // keys [8, depth, 16, 16, 2], 16 each, and then
                               // values [4, padded value_dim / 16, 16, 16, 2], 32 each
  Element* mended = nullptr;   // like its values
  float* scores = nullptr;     // [2][32, 128], of two blocks; a row's weights overwrite them
  float* leaf = nullptr;       // [32, padded value_dim], if a block's leaf folds at once
  float* wide = nullptr;       // keys, and then values, in fp32 panels (pack-inl.hpp)
  float* o = nullptr;          // [levels, rows, padded value_dim]
  Stats* stats = nullptr;      // [levels, rows]

  static int depth(const Geometry& p) { return (p.head_dim + 31) / 32; }
  static int columns(const Geometry& p) { return TileSpace::padded(p.value_dim) / 16; }
  /// The keys of whole tiles of the depth of P V.
  static Range whole_steps(Range keys) { return {keys.begin / 32 * 32, (keys.end + 31) / 32 * 32}; }
  static std::int64_t key_elements(const Geometry& p) { return std::int64_t{8} * depth(p) * kTile; }
  static std::int64_t value_elements(const Geometry& p) {
    return std::int64_t{4} * columns(p) * kTile;
  }
  static std::int64_t segment_elements(const Geometry& p) {
    return key_elements(p) + value_elements(p);
  }

  static std::size_t fixed_bytes(const Geometry& p) {
    const std::size_t elements = segment_elements(p) + value_elements(p);
    const std::size_t panels =
        std::max<std::size_t>(p.head_dim, TileSpace::panels(p.value_dim) * std::size_t{kPanel});
    return elements * sizeof(Element) + 4 * kSegment * (2 * kBf16BlockRows + panels) +
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
    const std::int64_t capacity = rows;
    take(segment, segment_elements(p));
    take(mended, value_elements(p));
    take(scores, std::int64_t{2} * kBf16BlockRows * kSegment);
    take(leaf, std::int64_t{kBf16BlockRows} * TileSpace::padded(p.value_dim));
    take(wide,
         kSegment * std::max<std::int64_t>(p.head_dim, TileSpace::panels(p.value_dim) * kPanel));
    take(q, capacity * depth(p) * 32);
    take(o, levels * capacity * TileSpace::padded(p.value_dim));
    take(stats, levels * capacity);
  }
};

/// Whether keys and values are packed directly from bf16 rows, without conversion to fp32.
inline bool packs_dense_bf16(const AttendParams& p) {
  return p.kv_dtype == DType::bf16 && p.k.dense() && p.v.dense() && p.head_dim % 32 == 0 &&
         p.value_dim % 32 == 0;
}

/// Packs the keys `keys` of a segment whose rows are `rows`, and its values, in the layout of a
/// Bf16Space; returns whether all values are finite. `wide` is as there. Only with
/// has_bf16_products().
bool pack_bf16_segment(const AttendParams& params, const KeyRows& rows, Range keys, float* wide,
                       Bf16Space::Element* to);

/// Leaves the state of the tile's rows in level 0 of the space. Without `packed` the tile packs for
/// itself. Only with has_bf16_products().
void attend_bf16_tile(const AttendParams& params, const Tile& tile, const PackedSegments& packed,
                      const Bf16Space& space);

}  // namespace longspan::kernels::host
