// Tables of the cosines and sines of RoPE for tests, with gaps of NaN between their rows.
#pragma once

#include <cmath>
#include <limits>
#include <utility>

#include "longspan/options.hpp"
#include "longspan/tensor.hpp"
#include "tests/support/host_pages.hpp"

namespace longspan::tests {

struct RopeTables {
  static constexpr std::int64_t kGap = 3;
  std::int64_t positions, pairs;
  Array cos, sin;

  RopeTables(const RopeOptions& rope, std::int64_t count, DType dtype)
      : positions(count),
        pairs(rope.dim / 2),
        cos(dtype, count * (pairs + kGap)),
        sin(dtype, count * (pairs + kGap)) {
    for (std::int64_t p = 0; p < positions; ++p)
      for (std::int64_t i = 0; i < pairs; ++i) {
        const double angle = static_cast<double>(p) / rope.scale *
                             std::pow(double{rope.base}, -2.0 * static_cast<double>(i) / rope.dim);
        cos.set(p * (pairs + kGap) + i, static_cast<float>(std::cos(angle)));
        sin.set(p * (pairs + kGap) + i, static_cast<float>(std::sin(angle)));
      }
  }

  /// The numbers that the tables hold for a pair; below position 0 the sine is that of -position.
  std::pair<double, double> at(std::int64_t position, std::int64_t pair) const {
    const std::int64_t i = std::abs(position) * (pairs + kGap) + pair;
    return {cos[i], position < 0 ? -sin[i] : sin[i]};
  }

  Tensor view(Array& table) const {
    return Tensor(table.data(), table.dtype, {positions, pairs}, {pairs + kGap, 1});
  }
};

}  // namespace longspan::tests
