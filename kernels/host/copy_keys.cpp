// Copies keys and values from a cache of any form to contiguous rows (kernels/copy_keys.hpp).
#include "kernels/copy_keys.hpp"

#include <algorithm>
#include <cstring>

#include "kernels/host/host.hpp"

namespace longspan::kernels::host {
namespace {

constexpr std::int64_t kKeys = 64;  // that a thread takes at a time

void copy_row(const KeyCopy& copy, int kv_heads, const StorageFormat& format, const CacheRow& row,
              std::int64_t to) {
  const KvRows& from = copy.from;
  const std::int64_t head_bytes = format.bytes(copy.step);
  const std::byte* source = from.address(format, row.offset(from));
  std::byte* target = copy.to + to * kv_heads * head_bytes;
  if (from.dense() && from.head_stride == copy.dim && copy.step == copy.dim) {
    std::memcpy(target, source, static_cast<std::size_t>(kv_heads * head_bytes));
    return;
  }
  for (int head = 0; head < kv_heads; ++head, target += head_bytes) {
    const std::byte* of_head = source + format.bytes(head * from.head_stride);
    if (from.dense()) {
      std::memcpy(target, of_head, static_cast<std::size_t>(format.bytes(copy.dim)));
      continue;
    }
    for (int d = 0; d < copy.dim; ++d)
      std::memcpy(target + format.bytes(d), of_head + format.bytes(from.column(d)),
                  static_cast<std::size_t>(format.bytes(1)));
  }
}

}  // namespace

void copy_keys(const CopyKeysParams& p, ThreadPool& pool) {
  const Geometry& g = p.geometry;
  const StorageFormat format = storage_of(g.kv_dtype);
  const std::int64_t stretches = (p.longest + kKeys - 1) / kKeys;
  pool.run(g.batch.size * stretches, [&](std::int64_t item, int) {
    const int b = static_cast<int>(item / stretches);
    const std::int64_t first = item % stretches * kKeys;
    const Interval keys = copied_keys(p, b);
    for (std::int64_t i = std::max(first, keys.begin); i < std::min(first + kKeys, keys.end); ++i) {
      const KeyPlace place = place_of(p, b, i);
      if (place.to < 0) continue;
      for (const KeyPart part : {KeyPart::keys, KeyPart::values, KeyPart::scales})
        if (const KeyCopy copy = part_of(p, part); copy.to != nullptr)
          copy_row(copy, g.kv_heads, format, place.from, place.to);
    }
  });
}

}  // namespace longspan::kernels::host
