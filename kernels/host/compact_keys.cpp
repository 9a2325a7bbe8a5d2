// Makes the lists of a sparse attention (kernels/key_indices.hpp).
#include <algorithm>

#include "kernels/host/host.hpp"

namespace longspan::kernels::host {

void compact_keys(const CompactParams& p, ThreadPool& pool) {
  constexpr std::int64_t kListsOfItem = 16;
  const std::int64_t lists = p.lists(), rows = p.rows() * p.indices.heads;
  pool.run((lists + kListsOfItem - 1) / kListsOfItem, [&](std::int64_t item, int) {
    const std::int64_t end = std::min(lists, (item + 1) * kListsOfItem);
    for (std::int64_t i = item * kListsOfItem; i < end; ++i) {
      const CompactList list(p, i);
      int kept = 0;
      for (int j = 0; j < list.count; ++j) {
        const std::int32_t entry = list.entry(p, list.from[j]);
        if (entry >= 0) list.to[kept++] = entry;
      }
      p.counts[i] = kept;
      p.starts[i] = static_cast<std::int32_t>(std::min(i, rows));
    }
  });
  p.starts[lists] = static_cast<std::int32_t>(rows);
}

}  // namespace longspan::kernels::host
