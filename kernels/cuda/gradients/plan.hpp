// How backward is divided into work for thread blocks, for host and device.
//
// A gradient is W X: a block owns a tile of rows or of keys, and walks over tiles of the others,
//
//     gradient   owns    W                     X
//     dq         rows    dX                    keys
//     dk         keys    dX, transposed        queries
//     dv         keys    P, transposed         dout
//
// so that sums stay in its registers, in one order. dk and dv are work of their own: that costs 8
// products for 7, and leaves registers for heads twice as wide. Wider heads than an instance has
// columns are cut into panels of columns, which are work of their own too.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/common/divisor.hpp"
#include "kernels/gradient_params.hpp"

namespace longspan::kernels::cuda {

enum class Gradient : std::uint8_t { dq, dk, dv };

/// The levels of the fixed order's stack: those of 64 virtual ranks, and the sum in progress.
inline constexpr int kFoldLevels = 1 + 7;

/// The work of one launch: that of dq, or that of dk and dv.
struct GradientPlan {
  bool rows_own = true;   // dq
  int tile = 1;           // rows or keys that a block owns
  int columns = 1;        // of a panel
  int tiles = 0;          // over the batch; an upper bound
  int first_panels = 1;   // of dq or dk
  int second_panels = 0;  // of dv
  int works = 0;          // tiles x kv heads x panels; some turn out to be empty
  int blocks = 0;
  Divisor by_panels, by_tiles, by_group;
  // Whether eight elements at a time may be read of each row.
  bool q_aligned = false, k_aligned = false, v_aligned = false, dout_aligned = false;
  float* stack = nullptr;    // [blocks, kFoldLevels, tile, columns]; in the fixed order
  double* slopes = nullptr;  // [kv_heads, tokens * group] dS times distances; null: not wanted

  LONGSPAN_HD int panels() const { return first_panels + second_panels; }
  std::size_t stack_bytes() const {
    return std::size_t{4} * static_cast<std::size_t>(blocks) * kFoldLevels *
           static_cast<std::size_t>(tile * columns);
  }
};

/// Rows of a kv head's group are packed, as in attention (view.cuh).
LONGSPAN_HD inline int group_of(const Geometry& p) { return p.heads / p.kv_heads; }

/// The first row of sequence b in the sums of dk and dv.
LONGSPAN_HD inline std::int64_t first_key_sum(const GradientParams& p, int b) {
  return p.key_sum_start != nullptr ? p.key_sum_start[b] : p.batch.first_key(b);
}

/// The first tile of sequence b. Tiles are packed over the batch, with at most one empty tile for
/// each sequence, so that no prefix sum is needed.
LONGSPAN_HD inline std::int64_t first_owned_tile(const GradientParams& p, const GradientPlan& plan,
                                                 int b) {
  const std::int64_t first =
      plan.rows_own ? p.batch.first_row(b) * group_of(p) : first_key_sum(p, b);
  return first / plan.tile + b;
}

}  // namespace longspan::kernels::cuda
