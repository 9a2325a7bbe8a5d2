// Turns the gradient of a rotated row into that of the row before its rotation, by the transpose;
// on host and CUDA.
#pragma once

#include "longspan/rope.hpp"
#include "longspan/types.hpp"

namespace longspan::kernels {

/// Turns a pair of the elements of a row's gradient back, in place.
LONGSPAN_HD inline void turn_back(const Rope& rope, int pair, Rotation by, float* gradient) {
  const int first = rope.interleaved ? 2 * pair : pair;
  float &x = gradient[first], &y = gradient[rope.partner(first)];
  const float before = x * by.cos + y * by.sin;
  y = y * by.cos - x * by.sin;
  x = before;
}

}  // namespace longspan::kernels
