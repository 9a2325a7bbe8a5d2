// One segment of keys against one tile of query rows, in backward. A thread owns its memory, which
// stays in its caches. Where tiles are cut depends on the problem alone, never on the threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/gradient_params.hpp"
#include "kernels/host/tile.hpp"
#include "kernels/host/visible.hpp"

namespace longspan::kernels::host {

inline constexpr int kGradientRows = 96;  // of a tile; a multiple of kBlockRows

/// A thread's memory. Columns are padded to 16.
struct GradientSpace {
  float* keys = nullptr;      // [2, head_dim, 64] transposed
  float* values = nullptr;    // [2, value_dim, 64] transposed
  float* key_rows = nullptr;  // [128, head_dim]
  float* q = nullptr;         // [rows, head_dim]
  float* dout = nullptr;      // [rows, value_dim]
  float* weights = nullptr;   // [rows, 128] first the scores
  float* dx = nullptr;        // [rows, 128] first dout.v
  float* slope = nullptr;     // [rows, 128] 1 - tanh^2 of the softcap
  float* dq = nullptr;        // [levels, rows, head_dim]
  float* dk = nullptr;        // [levels, 128, head_dim]
  float* dv = nullptr;        // [levels, 128, value_dim]

  static std::size_t floats(const Geometry& p, int levels) {
    const std::size_t d = GradientSums::padded(p.head_dim), dv = GradientSums::padded(p.value_dim);
    return kSegment * (2 * d + dv) + kGradientRows * (d + dv + 3 * kSegment) +
           levels * (kGradientRows * d + kSegment * (d + dv));
  }
  GradientSpace(float* memory, const Geometry& g, int levels) {
    const std::size_t d = GradientSums::padded(g.head_dim),
                      of_v = GradientSums::padded(g.value_dim);
    const auto take = [&](std::size_t count) {
      float* const part = memory;
      memory += count;
      return part;
    };
    keys = take(kSegment * d);
    values = take(kSegment * of_v);
    key_rows = take(kSegment * d);
    q = take(kGradientRows * d);
    dout = take(kGradientRows * of_v);
    for (float** scores : {&weights, &dx, &slope}) *scores = take(kGradientRows * kSegment);
    dq = take(levels * kGradientRows * d);
    dk = take(levels * kSegment * d);
    dv = take(levels * kSegment * of_v);
  }
};

/// The same memory, used by products of bf16. A pair holds two neighbours of a product's depth.
struct Bf16Operands {
  using Element = std::uint16_t;
  using Pair = std::uint32_t;

  Pair* keys = nullptr;           // [2, head_dim / 2, 64] transposed
  Pair* values = nullptr;         // [2, value_dim / 2, 64] transposed
  Element* value_rows = nullptr;  // [128, value_dim] while they are packed
  Pair* key_pairs = nullptr;      // [64, head_dim] of two keys each
  Element* key_rows = nullptr;    // [128, head_dim] while they are packed
  Element* q = nullptr;           // [rows, head_dim]
  Pair* q_pairs = nullptr;        // [rows / 2, head_dim] of two rows each
  Element* dout = nullptr;        // [rows, value_dim]
  Pair* dout_pairs = nullptr;     // [rows / 2, value_dim]
  float* scores = nullptr;        // [6, 128] of one block of rows
  float* dx = nullptr;            // [6, 128]
  Pair* p_pairs = nullptr;        // [rows / 2, 128] the weights of two rows each
  Element* dx_rows = nullptr;     // [rows, 128]
  Pair* dx_pairs = nullptr;       // [rows / 2, 128]

  Bf16Operands(const GradientSpace& space, const Geometry& g)
      : scores(space.weights), dx(scores + kBlockRows * kSegment) {
    const int d = GradientSums::padded(g.head_dim), of_v = GradientSums::padded(g.value_dim);
    const auto halves = [](float* memory, int rows, int columns, auto*& first, auto*& second) {
      first = reinterpret_cast<std::remove_reference_t<decltype(first)>>(memory);
      second =
          reinterpret_cast<std::remove_reference_t<decltype(second)>>(memory + rows / 2 * columns);
    };
    Element* none = nullptr;
    halves(space.keys, kSegment, d, keys, none);
    halves(space.values, kSegment, of_v, values, value_rows);
    halves(space.key_rows, kSegment, d, key_pairs, key_rows);
    halves(space.q, kGradientRows, d, q, q_pairs);
    halves(space.dout, kGradientRows, of_v, dout, dout_pairs);
    halves(space.dx, kGradientRows, kSegment, dx_rows, dx_pairs);
    p_pairs = reinterpret_cast<Pair*>(dx + kBlockRows * kSegment);
  }
};

/// Whether the CPU has AVX-512 BF16, and the kernels are built for it.
bool has_bf16_gradients();
/// Whether it makes the products of these gradients (DTypes::bf16_products). dX and the weights are
/// rounded to bf16 before they are multiplied; sums are fp32.
bool by_bf16(const GradientParams& p);

/// A segment's keys and values, packed.
struct PackedKeyRows {
  Segment segment;
  bool finite = true;  // all elements of the keys
};

/// A tile's rows, packed.
struct PackedQueryRows {
  bool finite = true;  // all elements of q and dout
};

/// Packs a segment of the tile's kv head: the keys that some row of the sequence may see.
void pack_gradient_keys(const GradientParams& p, const Sequence& s, int kv_head,
                        const Segment& segment, const GradientSpace& space, PackedKeyRows& packed);
void pack_gradient_rows(const GradientParams& p, const Tile& tile, const GradientSpace& space,
                        PackedQueryRows& packed);

/// Calls visit(row of the tile, token, head) for its rows.
template <class Visit>
void for_each_row(const Geometry& p, const Tile& tile, Visit&& visit) {
  const int group = p.heads / p.kv_heads;
  for (int r = 0; r < tile.rows; ++r) {
    const std::int64_t row = tile.first + r;
    visit(r, tile.sequence.first_row + row / group, tile.kv_head * group + row % group);
  }
}

/// Where the sums of a tile and a segment go; null: not wanted.
struct TileSums {
  float* dq = nullptr;       // [rows, padded head_dim]
  float* dk = nullptr;       // [128, padded head_dim], with dv
  float* dv = nullptr;       // [128, padded value_dim]
  double* slopes = nullptr;  // [rows] of dS times the distances of ALiBi
  float* qq = nullptr;       // [width, GradientParams::biases.qq_stride] of dS
};

/// Adds the products of the packed tile and segment.
void gradient_tile(const GradientParams& p, const Tile& tile, const PackedQueryRows& rows,
                   const PackedKeyRows& keys, const GradientSpace& space, const TileSums& sums);

/// a += b, n floats; n is a multiple of 16.
void add_sums(float* a, const float* b, std::int64_t n);

/// Widens rows [begin, end) of dout and dlse.
void widen_gradients(const WidenGradientsParams& p, std::int64_t begin, std::int64_t end);

/// Computes the terms of rows [begin, end).
void row_terms(const RowTermParams& p, std::int64_t begin, std::int64_t end);

/// Rounds and stores rows [begin, end) of a kv head's sums.
void store_gradients(const StoreGradientParams& p, int kv_head, std::int64_t begin,
                     std::int64_t end);

}  // namespace longspan::kernels::host
