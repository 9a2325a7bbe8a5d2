// Ranks that hold a cache, drawn for tests of reshards.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "longspan/reshard.hpp"

namespace longspan::tests {

/// The layouts that a reshard takes.
inline constexpr Layout kReshardLayouts[] = {Layout::contiguous, Layout::ranges, Layout::zigzag,
                                             Layout::striped, Layout::interleaved};

/// Some of `world` ranks, with a table where the layout has one. below(n) draws from 0 to n - 1.
template <class Below>
CacheRanks draw_cache_ranks(Layout layout, int world, const std::vector<std::int64_t>& lengths,
                            const Below& below) {
  CacheRanks cache{.rule = {layout, 1 + below(40)}};
  cache.first_rank = static_cast<int>(below(world));
  cache.ranks = static_cast<int>(1 + below(world - cache.first_rank));
  for (const std::int64_t n : lengths) {
    if (layout != Layout::ranges) break;
    std::vector<std::int64_t> cuts{0, n};
    for (int r = 1; r < cache.ranks; ++r) cuts.push_back(below(n + 1));
    std::sort(cuts.begin(), cuts.end());
    cache.table.insert(cache.table.end(), cuts.begin(), cuts.end());
  }
  return cache;
}

}  // namespace longspan::tests
