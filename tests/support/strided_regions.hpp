// Blocks of rows at any step and address, each in its own region of one array, for tests of copies.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "src/base/strided_copy.hpp"

namespace longspan::tests {

struct StridedShape {
  std::int64_t width, rows, from_gap, to_gap, ahead;  // gaps: of the pitch beyond the width
};

/// The source and target regions of each shape, in an array of `bytes`.
struct StridedRegions {
  explicit StridedRegions(const std::vector<StridedShape>& of) : shapes(of) {
    for (const StridedShape& s : shapes) {
      begins.push_back(static_cast<std::ptrdiff_t>(bytes) + s.ahead);
      bytes += static_cast<std::size_t>(s.ahead + s.rows * (s.width + s.from_gap + s.to_gap));
      bytes = (bytes + 63) / 16 * 16;
    }
  }

  /// The copy of the i-th from one array to another.
  StridedCopy copy(std::size_t i, const std::byte* from, std::byte* to) const {
    const StridedShape& s = shapes[i];
    return {from + begins[i],   to + begins[i], s.width + s.from_gap,
            s.width + s.to_gap, s.width,        s.rows};
  }
  /// Does it on the host, row by row.
  void apply(std::size_t i, const std::vector<std::byte>& from, std::vector<std::byte>& to) const {
    const StridedCopy c = copy(i, from.data(), to.data());
    for (std::int64_t row = 0; row < c.rows; ++row)
      std::copy_n(c.from + row * c.from_pitch, c.width, c.to + row * c.to_pitch);
  }

  std::vector<StridedShape> shapes;
  std::vector<std::ptrdiff_t> begins;
  std::size_t bytes = 0;
};

}  // namespace longspan::tests
