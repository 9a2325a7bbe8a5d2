#include "src/strategy/shared/stretches.hpp"

#include <algorithm>

#include "kernels/consecutive_keys.hpp"
#include "src/divided_up.hpp"
#include "src/strategy/strategy.hpp"

namespace longspan {

std::optional<std::vector<Stretch>> stretches_of(const Shard& shard, std::int64_t length) {
  std::vector<Stretch> found;
  const std::int64_t own = shard.local_len(length);
  for (std::int64_t first = 0; first < own; first += found.back().count) {
    if (found.size() == kMostStretches) return std::nullopt;
    found.push_back({first, kernels::consecutive_keys(shard, first, own, length),
                     shard.position(first, length)});
  }
  return found;
}

std::vector<Stretch> in_portions(std::vector<Stretch> stretches, int most) {
  std::sort(stretches.begin(), stretches.end(),
            [](const Stretch& a, const Stretch& b) { return a.position > b.position; });
  // Each stretch ends with a portion that may be short.
  const auto count = static_cast<std::int64_t>(stretches.size());
  const std::int64_t full = std::max<std::int64_t>(most + 1 - count, 1);
  const std::int64_t longest = divided_up(count_rows(stretches), full);
  std::vector<Stretch> portions;
  for (const Stretch& one : stretches) {
    const std::int64_t length = divided_up(one.count, divided_up(one.count, longest));
    for (std::int64_t end = one.count; end > 0; end -= length) {
      const std::int64_t begin = std::max<std::int64_t>(end - length, 0);
      portions.push_back({one.first + begin, end - begin, one.position + begin});
    }
  }
  return portions;
}

bool is_one_known_sequence(const RunArrays& arrays) {
  return arrays.batch == 1 && arrays.query_start == nullptr && arrays.kv_len == nullptr &&
         !is_by_table(arrays.keys.layout) && !is_by_table(arrays.queries.layout);
}

}  // namespace longspan
