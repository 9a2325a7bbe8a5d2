// Writes new keys and values into this rank's cache, row by row to their slots, rounded once to the
// cache's type. RoPE rotates keys before.
//
//     cache[slot] = x / scale
//
// A row that carries its scales (RowFormat) gets one for each group of its numbers, from their
// largest size.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include "kernels/batch_rows.hpp"
#include "kernels/host/host.hpp"
#include "kernels/host/rotations.hpp"

namespace longspan::kernels::host {
namespace {

struct Tensors {
  const Rows& from;
  const KvRows& to;
  ScaleView scales;  // of the row in the cache
  int dim;           // of a row of a head
  const Rotations* rotations = nullptr;
};

/// Stores row `token` of the new tensor at the offset `at` (in elements) of the cache.
void store_row(const AppendParams& p, const Tensors& t, std::int64_t token, std::int64_t at) {
  const bool plain = p.dtype == p.kv_dtype && !t.scales && t.rotations == nullptr;
  const StorageFormat format = storage_of(p.dtype);
  for (int head = 0; head < p.kv_heads; ++head) {
    const std::int64_t from = token * t.from.row_stride + head * t.from.head_stride;
    const std::int64_t to = at + head * t.to.head_stride;
    if (plain && t.to.dense()) {
      std::memcpy(t.to.address(format, to), t.from.address(format, from),
                  static_cast<std::size_t>(format.row_bytes(t.dim)));
      continue;
    }
    const float scale = t.scales.of(0, head);
    for (int d = 0; d < t.dim; ++d) {
      const float value = t.rotations != nullptr
                              ? t.rotations->element(t.from.data, p.dtype, from, d)
                              : load_element(t.from.data, p.dtype, from + d);
      store_element(t.to.data, p.kv_dtype, to + t.to.column(d), t.scales ? value / scale : value);
    }
  }
}

/// Stores row `token` of the new keys as a row that carries its scales.
void store_row(const AppendParams& p, const RowFormat& format, std::int64_t token,
               const StoredRow& to) {
  const auto number = [&](int c) {
    return load_element(p.new_k.data, p.dtype, token * p.new_k.row_stride + c);
  };
  for (int c = 0; c < format.coded;) {
    float amax = 0;
    const int group = c / format.group, end = std::min(c + format.group, format.coded);
    for (int i = c; i < end; ++i) amax = std::fmax(amax, std::abs(number(i)));
    const float scale = scale_for(format, amax);
    store_scale(to, format, group, scale);
    for (; c < end; ++c) store_number(to, format, c, scale, number(c));
  }
  for (int c = format.coded; c < format.dim; ++c) store_number(to, format, c, 1, number(c));
}

}  // namespace

void append(const AppendParams& p, ThreadPool& pool) {
  pool.run(p.tokens, [&](std::int64_t token, int) {
    const CacheRow row = cache_row(p, token);
    if (row.row < 0) return;
    if (is_latent_row(p.kv_dtype))
      return store_row(p, row_format_of(p.kv_dtype), token, p.k.stored(row.page, row.row));
    Tensors keys{p.new_k, p.k, scales_at(p, p.k_scale, token, row), p.head_dim};
    std::optional<Rotations> rotations;
    if (p.rope) keys.rotations = &rotations.emplace(p.rope, new_position(p, token));
    store_row(p, keys, token, row.offset(p.k));
    if (p.new_v.data == nullptr) return;
    store_row(p, {p.new_v, p.v, scales_at(p, p.v_scale, token, row), p.value_dim}, token,
              row.offset(p.v));
  });
}

}  // namespace longspan::kernels::host
