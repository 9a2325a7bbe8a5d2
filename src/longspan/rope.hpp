/// \file
/// RoPE: the first `dim` elements of a row form pairs, and the row's position rotates each.
///
///     x' = x cos - y sin        y' = y cos + x sin
///
/// The angle of pair i is position / (scale * base^(2i / dim)), or tables hold its cosine and sine.
/// The arithmetic is fp32, with one rounding to the type of the result. Host and CUDA run these
/// functions.
#pragma once

#include <bit>
#include <cstdint>

#include "longspan/element.hpp"
#include "longspan/types.hpp"

namespace longspan {

/// The cosine and sine of an angle.
struct Rotation {
  float cos = 1.0f;  ///< cosine
  float sin = 0.0f;  ///< sine
};

/// The rotation by `turn` * 2^-64 turns. A whole number of turns wraps to 0 by itself, so a product
/// of an integer position and the turns of one position loses nothing by its size.
LONGSPAN_HD inline Rotation rotation_of(std::uint64_t turn) {
  const std::uint64_t quarter = (turn + (std::uint64_t{1} << 61)) >> 62;  // the nearest
  const auto remainder =
      static_cast<std::int64_t>(turn - (quarter << 62));  // at most an eighth turn
  const float angle =
      static_cast<float>(remainder) * (6.283185307179586f / 18446744073709551616.0f);
  const float square = angle * angle;
  // Minimax polynomials over an eighth of a turn (Moshier, Cephes), within one unit of fp32.
  const float sin =
      angle + angle * square *
                  (-1.6666654611e-1f + square * (8.3321608736e-3f - 1.9515295891e-4f * square));
  const float cos = 1.0f - 0.5f * square +
                    square * square *
                        (4.166664568298827e-2f +
                         square * (-1.388731625493765e-3f + 2.443315711809948e-5f * square));
  switch (quarter & 3) {
    case 0:
      return {cos, sin};
    case 1:
      return {-sin, cos};
    case 2:
      return {-cos, -sin};
    default:
      return {sin, -cos};
  }
}

/// Cosines or sines, [positions, dim / 2] of fp32, fp16 or bf16.
struct RopeTable {
  Floats values;                ///< null: not given
  std::int64_t row_stride = 0;  ///< elements from one position to the next
};

/// A rotation of rows, as kernels take it.
struct Rope {
  int dim = 0;               ///< elements of a row that are rotated: an even number; 0: none
  bool interleaved = false;  ///< pairs are (2i, 2i + 1), otherwise (i, i + dim / 2)
  const std::uint64_t* turns = nullptr;  ///< [dim / 2] of one position, times 2^64, modulo 2^64;
                                         ///< null with tables
  RopeTable cos;                         ///< in place of `turns`
  RopeTable sin;                         ///< like cos
  std::int64_t positions = 0;            ///< rows of the tables

  /// Whether anything is rotated.
  LONGSPAN_HD explicit operator bool() const { return dim > 0; }

  /// The pair of element d.
  LONGSPAN_HD int pair(int d) const {
    if (interleaved) return d / 2;
    return d < dim / 2 ? d : d - dim / 2;
  }
  /// Whether element d is the first of its pair.
  LONGSPAN_HD bool is_first(int d) const { return interleaved ? d % 2 == 0 : d < dim / 2; }
  /// The other element of the pair.
  LONGSPAN_HD int partner(int d) const {
    const int apart = interleaved ? 1 : dim / 2;
    return is_first(d) ? d + apart : d - apart;
  }

  /// The rotation of a pair at a position. Below 0 it is the inverse one of -position. Past the end
  /// of the tables it is NaN.
  LONGSPAN_HD Rotation at(std::int64_t position, int pair) const {
    if (!cos.values) return rotation_of(static_cast<std::uint64_t>(position) * turns[pair]);
    const std::int64_t row = position < 0 ? -position : position;
    const float none = std::bit_cast<float>(0x7fc00000u);
    if (row >= positions) return {none, none};
    const float sine = sin.values[row * sin.row_stride + pair];
    return {cos.values[row * cos.row_stride + pair], position < 0 ? -sine : sine};
  }

  /// Element d of a rotated row, from its value and its partner's.
  LONGSPAN_HD float rotated(int d, float own, float partner, Rotation by) const {
    return own * by.cos + partner * (is_first(d) ? -by.sin : by.sin);
  }
};

/// The greatest distance from position 0 of `rows` positions from `first` on, which may be
/// negative: the tables need one position more.
LONGSPAN_HD inline std::int64_t farthest_position(std::int64_t first, std::int64_t rows) {
  if (rows <= 0) return -1;
  return first + rows - 1 > -first ? first + rows - 1 : -first;
}

}  // namespace longspan
