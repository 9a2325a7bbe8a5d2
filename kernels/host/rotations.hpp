// The rotations of one position (longspan/rope.hpp), made once for all heads of a row, and the way
// back, by the transpose.
#pragma once

#include <array>
#include <cstdint>

#include "kernels/turn_back.hpp"
#include "longspan/limits.hpp"
#include "longspan/rope.hpp"

namespace longspan::kernels::host {

class Rotations {
 public:
  Rotations(const Rope& rope, std::int64_t position) : rope_(rope) {
    for (int pair = 0; pair < rope.dim / 2; ++pair) by_[pair] = rope.at(position, pair);
  }

  /// Element d of the row that begins at element `row` of `data`, rotated.
  float element(const void* data, DType dtype, std::int64_t row, int d) const {
    const float own = load_element(data, dtype, row + d);
    if (d >= rope_.dim) return own;
    const float partner = load_element(data, dtype, row + rope_.partner(d));
    return rope_.rotated(d, own, partner, by_[rope_.pair(d)]);
  }

  /// Turns the gradient of a rotated row into that of the row before its rotation, in place.
  void turn_back(float* gradient) const {
    for (int pair = 0; pair < rope_.dim / 2; ++pair)
      kernels::turn_back(rope_, pair, by_[pair], gradient);
  }

 private:
  const Rope& rope_;
  std::array<Rotation, kMaxHeadDim / 2> by_;
};

}  // namespace longspan::kernels::host
