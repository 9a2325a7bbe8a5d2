#include "src/strategy/shared/stretches.hpp"

#include <utility>

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

std::optional<StretchesOfRanks> stretches_of_ranks(const Shard& shard, int ranks,
                                                   std::int64_t length) {
  StretchesOfRanks all;
  for (int rank = 0; rank < ranks; ++rank) {
    std::optional<std::vector<Stretch>> found = stretches_of(shard.with_rank(rank), length);
    if (!found) return std::nullopt;
    all.push_back(*std::move(found));
  }
  return all;
}

bool is_one_known_sequence(const RunArrays& arrays) {
  return arrays.batch == 1 && arrays.query_start == nullptr && arrays.kv_len == nullptr &&
         !is_by_table(arrays.keys.layout) && !is_by_table(arrays.queries.layout);
}

}  // namespace longspan
