#include "kernels/consecutive_keys.hpp"

#include <algorithm>

namespace longspan::kernels {

std::int64_t consecutive_keys(const Shard& shard, std::int64_t first, std::int64_t own,
                              std::int64_t length) {
  const std::int64_t position = shard.position(first, length);
  const auto is_consecutive = [&](std::int64_t n) {
    return shard.position(first + n - 1, length) == position + n - 1;
  };
  std::int64_t known = 1, beyond = 2;
  if (shard.layout == Layout::listed) {  // in any order
    while (first + known < own && is_consecutive(known + 1)) ++known;
    return known;
  }
  // Positions ascend, so the last one can be searched for: by doubling until it is passed, then by
  // bisection.
  while (first + beyond <= own && is_consecutive(beyond)) {
    known = beyond;
    beyond *= 2;
  }
  beyond = std::min(beyond, own - first + 1);
  while (beyond - known > 1) {
    const std::int64_t middle = known + (beyond - known) / 2;
    (is_consecutive(middle) ? known : beyond) = middle;
  }
  return known;
}

}  // namespace longspan::kernels
