// The definition of a mask, key by key.
#pragma once

#include <cstdint>
#include <span>

#include "longspan/mask.hpp"

namespace longspan::tests {

/// floor(a / b), b > 0.
inline std::int64_t floor_of(std::int64_t a, std::int64_t b) { return a / b - (a % b < 0 ? 1 : 0); }

/// Whether i and j are in one of the ranges, each its begin and its end.
inline bool in_one_range(std::span<const std::int64_t> ranges, std::int64_t i, std::int64_t j) {
  for (std::size_t r = 0; r + 1 < ranges.size(); r += 2)
    if (ranges[r] <= i && i < ranges[r + 1] && ranges[r] <= j && j < ranges[r + 1]) return true;
  return false;
}

/// Whether the query at position i of a sequence of kv_len keys sees key j. Chunks begin at
/// `first`.
inline bool sees(const Mask& m, std::int64_t i, std::int64_t j, std::int64_t kv_len,
                 std::int64_t first = 0, std::span<const std::int64_t> ranges = {}) {
  if (j < 0 || j >= kv_len) return false;
  const std::int64_t chunks =
      m.chunk == 0 ? 0 : floor_of(i - first, m.chunk) - floor_of(j - first, m.chunk);
  const bool on_the_left =
      j < m.prefix || ((m.window == 0 || i - j < m.window) && chunks <= m.lookback);
  const bool on_the_right =
      (!m.causal || j <= i) && (m.causal || m.right < 0 || j - i <= m.right) && chunks >= 0;
  const bool ranged = in_one_range(ranges, i, j);
  return (on_the_left || (ranged && !m.clamp_ranges)) && (on_the_right || ranged);
}

}  // namespace longspan::tests
