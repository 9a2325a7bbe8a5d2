// Tiles of products of fp64, computed in fp64 throughout: products, scores, weights and sums. Keys
// fold by position, and every sum is one chain, so the bits of a row depend neither on tiles nor on
// ranks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/gradient_params.hpp"
#include "kernels/host/tile.hpp"
#include "kernels/host/visible.hpp"

namespace longspan::kernels::host {

inline constexpr int kWideRows = 16;    // of a tile
inline constexpr int kWideColumns = 8;  // rows of matrices are padded to a multiple

/// The lse of a row, which is of fp64 here.
inline double* wide_lse(const TokenLse& lse, std::int64_t row, std::int64_t head) {
  return reinterpret_cast<double*>(lse.data) + (lse.at(row, head) - lse.data);
}

/// A thread's memory: what a tile needs of a segment, and its own rows.
struct WideSpace {
  double* keys = nullptr;           // [head_dim, 128] transposed
  double* values = nullptr;         // [128, value_dim]
  double* q = nullptr;              // [rows, head_dim]
  double* scores = nullptr;         // [rows, 128], then weights
  double* o = nullptr;              // [rows, value_dim]
  double* max = nullptr;            // [rows] largest score
  double* sum = nullptr;            // [rows] of exp(score - max)
  double* key_rows = nullptr;       // [128, head_dim]; for gradients, as what follows
  double* value_columns = nullptr;  // [value_dim, 128] transposed
  double* dout = nullptr;           // [rows, value_dim]
  double* dx = nullptr;             // [rows, 128], first dout.v
  double* slope = nullptr;          // [rows, 128] d score / d (scale q.k)

  static int padded(int dim) { return (dim + kWideColumns - 1) / kWideColumns * kWideColumns; }
  /// The doubles of a space.
  static std::size_t size(const Geometry& p, bool gradients) {
    return WideSpace(nullptr, p, gradients).taken_;
  }

  WideSpace(double* memory, const Geometry& p, bool gradients) : memory_(memory) {
    const int head_dim = padded(p.head_dim), value_dim = padded(p.value_dim);
    keys = take(p.head_dim, kSegment);
    values = take(kSegment, value_dim);
    q = take(kWideRows, p.head_dim);
    scores = take(kWideRows, kSegment);
    o = take(kWideRows, value_dim);
    max = take(1, kWideRows);
    sum = take(1, kWideRows);
    if (!gradients) return;
    key_rows = take(kSegment, head_dim);
    value_columns = take(p.value_dim, kSegment);
    dout = take(kWideRows, value_dim);
    dx = take(kWideRows, kSegment);
    slope = take(kWideRows, kSegment);
  }

 private:
  double* take(int rows, int columns) {
    double* const part = memory_ == nullptr ? nullptr : memory_ + taken_;
    taken_ += static_cast<std::size_t>(rows) * static_cast<std::size_t>(columns);
    return part;
  }

  double* memory_;
  std::size_t taken_ = 0;
};

/// Attends a tile to all keys of its sequence, and writes its rows of the result.
void attend_fp64_tile(const AttendParams& p, const MergeParams& result, const Tile& tile,
                      const WideSpace& space);

/// Adds the products of a tile and a segment to dq, [rows of the tile, padded head_dim], or to dk
/// and dv, [keys of the segment, padded head_dim or value_dim]; null: not wanted.
struct WideGradients {
  double* dq = nullptr;
  double* dk = nullptr;
  double* dv = nullptr;
};
void pack_fp64_rows(const GradientParams& p, const Tile& tile, const WideSpace& space);
void gradient_fp64_tile(const GradientParams& p, const Tile& tile, const Segment& segment,
                        const WideSpace& space, const WideGradients& to);

}  // namespace longspan::kernels::host
