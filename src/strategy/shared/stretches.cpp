#include "src/strategy/shared/stretches.hpp"

#include "kernels/consecutive_keys.hpp"
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

bool is_one_known_sequence(const RunArrays& arrays) {
  return arrays.batch == 1 && arrays.query_start == nullptr && arrays.kv_len == nullptr &&
         !is_by_table(arrays.keys.layout) && !is_by_table(arrays.queries.layout);
}

}  // namespace longspan
