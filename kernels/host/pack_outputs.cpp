// Copies a finished part and its lse, row by row, to where they travel from.
#include <cstring>

#include "kernels/host/host.hpp"

namespace longspan::kernels::host {

void pack_outputs(const PackOutputsParams& p, ThreadPool& pool) {
  const auto size = static_cast<std::int64_t>(size_of(p.dtype));
  pool.run_stretches(p.tokens * p.heads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const std::int64_t token = row / p.heads, head = row % p.heads;
      const auto place = [&](const auto& rows) {
        return static_cast<std::byte*>(rows.data) + rows.offset(token, head) * size;
      };
      std::memcpy(place(p.to), place(p.from), static_cast<std::size_t>(p.row_bytes()));
      *p.to_lse.at(token, head) = *p.from_lse.at(token, head);
    }
  });
}

}  // namespace longspan::kernels::host
