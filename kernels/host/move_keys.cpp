// Moves keys and values between two places of any form (kernels/move_keys.hpp). A thread takes a
// run at a time.
#include "kernels/move_keys.hpp"

#include <cstring>

#include "kernels/host/host.hpp"

namespace longspan::kernels::host {
namespace {

void move_row(const KeyMove& move, int kv_heads, const StorageFormat& format, const CacheRow& from,
              const CacheRow& to) {
  const bool whole = move.from.dense() && move.to.dense();
  for (int head = 0; head < kv_heads; ++head) {
    const std::int64_t source_at = from.offset(move.from) + head * move.from.head_stride;
    const std::int64_t target_at = to.offset(move.to) + head * move.to.head_stride;
    const int together = whole ? move.dim : 1;
    for (int d = 0; d < move.dim; d += together)
      std::memcpy(move.to.address(format, target_at + move.to.column(d)),
                  move.from.address(format, source_at + move.from.column(d)),
                  static_cast<std::size_t>(format.bytes(together)));
  }
}

}  // namespace

void move_keys(const MoveKeysParams& p, ThreadPool& pool) {
  const StorageFormat format = storage_of(p.dtype);
  pool.run(p.count, [&](std::int64_t item, int) {
    const KeyRun& run = p.runs[item];
    for (std::int64_t i = 0; i < run.count; ++i) {
      const CacheRow from = p.from.row(run.sequence, run.from_key + i);
      const CacheRow to = p.to.row(run.sequence, run.to_key + i);
      if (from.row < 0 || to.row < 0) continue;
      for (const KeyPart part : {KeyPart::keys, KeyPart::values, KeyPart::scales})
        move_row(part_of(p, part), p.kv_heads, format, from, to);
    }
  });
}

}  // namespace longspan::kernels::host
