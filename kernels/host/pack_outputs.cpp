// Copies rows, and an lse, one by one to send buffers or to their final place; and distributes
// states.
#include <cstring>

#include "kernels/batch_rows.hpp"
#include "kernels/host/host.hpp"

namespace longspan::kernels::host {

void pack_outputs(const PackOutputsParams& p, ThreadPool& pool) {
  const StorageFormat format = storage_of(p.dtype);
  pool.run_stretches(p.tokens * p.heads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const std::int64_t token = row / p.heads, head = row % p.heads;
      const auto [from, to] = p.move(token);
      if (to < 0 || !in_batch(p.batch, to)) continue;
      const auto place = [&](const TokenRows& rows, std::int64_t at) {
        return rows.address(format, rows.offset(at, head));
      };
      std::memcpy(place(p.to, to), place(p.from, from), static_cast<std::size_t>(p.row_bytes()));
      if (p.to_lse.data != nullptr) *p.to_lse.at(to, head) = *p.from_lse.at(from, head);
    }
  });
}

void copy_rows(std::span<const StridedCopy> copies, ThreadPool& pool) {
  for (const StridedCopy& c : copies)
    pool.run_stretches(c.rows, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row)
        std::memcpy(c.to + row * c.to_pitch, c.from + row * c.from_pitch,
                    static_cast<std::size_t>(c.width));
    });
}

void pack_states(const PackStatesParams& p, ThreadPool& pool) {
  pool.run_stretches(p.moves(), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const PackStatesParams::RowMove move = p.move(i);
      if (move.from < 0) continue;
      p.to.stats(move.part)[move.to] = p.from.stats(p.slot)[move.from];
      std::memcpy(p.to.o(move.part, move.to), p.from.o(p.slot, move.from),
                  static_cast<std::size_t>(p.from.columns()) * sizeof(float));
    }
  });
}

}  // namespace longspan::kernels::host
