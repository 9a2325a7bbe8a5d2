// A rank's keys and values in pages: in any order, among pages of NaN, equal pages only once. Keys
// that no row sees are also NaN, and table entries that nothing needs point outside all memory.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kernels/params.hpp"
#include "longspan/element.hpp"

namespace longspan::tests {

/// Elements of any type; every byte 0xff, which is a NaN in all of them.
struct Array {
  DType dtype = DType::fp32;
  std::vector<std::byte> bytes;

  Array() = default;
  Array(DType type, std::int64_t n) : dtype(type), bytes(n * size_of(type), std::byte{0xff}) {}
  void* data() { return bytes.data(); }
  double operator[](std::int64_t i) const { return load_element(bytes.data(), dtype, i); }
  void set(std::int64_t i, float value) { store_element(bytes.data(), dtype, i, value); }
};

/// The layout of keys and values in pages.
enum class Store {
  rows,      // [page, kv_heads, dim]
  x_packed,  // K [kv_heads, dim / x, page, x], V [kv_heads, dim, page]
  odd,       // K [dim, kv_heads, page], V in chunks of 4
};

/// A rank's keys: packed sequence after sequence, or in pages.
struct Local {
  Array k, v;
  std::vector<std::int64_t> start;
  std::vector<std::int32_t> table;  // empty: not paged
  kernels::KvRows k_rows, v_rows;
  kernels::Pages pages;

  void give(kernels::AttendParams& p) {
    p.k = k_rows;
    p.v = v_rows;
    p.k.data = k.data();
    p.v.data = v.data();
    p.pages = pages;
    p.pages.table = table.empty() ? nullptr : table.data();
    p.batch.key_start = start.data();
  }
};

/// Whole sequences, packed, [keys, kv_heads, dim] with rows `stride` apart.
struct Whole {
  const Array& k;
  const Array& v;
  std::int64_t stride;
  int kv_heads, dim;
  const std::vector<std::int32_t>& kv_len;
  const std::vector<std::int32_t>& start;  // first key of each sequence
  std::vector<std::vector<bool>> seen;     // [batch][kv_len] some row sees the key

  static constexpr int kGap = 8;  // elements between pages, of NaN
  static constexpr std::int64_t kColumnStride = 2;

  Local paged(const Shard& rule, int size, Store store, std::uint32_t seed) const {
    Local l;
    const int batch = static_cast<int>(kv_len.size());
    l.pages.size = size;
    for (int b = 0; b < batch; ++b) {
      const std::int64_t columns =
          (rule.for_sequence(b).local_len(kv_len[b]) + size - 1) / size + 1;
      l.pages.columns = std::max(l.pages.columns, columns);
      l.pages.count += columns;
    }
    l.pages.column_stride = kColumnStride;
    l.pages.row_stride = l.pages.columns * kColumnStride + 3;
    l.table.assign(batch * l.pages.row_stride, 0x3fffffff);
    l.start.assign(batch, std::int64_t{1} << 50);  // not for pages
    set_layout(l, store);
    l.k = Array(k.dtype, l.pages.count * l.k_rows.page_stride);
    l.v = Array(v.dtype, l.pages.count * l.v_rows.page_stride);

    std::mt19937 random(seed + rule.rank);
    std::vector<std::int32_t> free(l.pages.count);
    std::iota(free.begin(), free.end(), 0);
    std::shuffle(free.begin(), free.end(), random);
    std::map<std::string, std::int32_t> known;
    for (int b = 0; b < batch; ++b) {
      const Shard shard = rule.for_sequence(b);
      for (std::int64_t first = 0; first < shard.local_len(kv_len[b]); first += size) {
        std::int32_t& entry = l.table[b * l.pages.row_stride + first / size * kColumnStride];
        const std::string content = content_of(b, shard, first, size);
        if (content.empty()) {
          if (random() % 2) entry = -1;
          continue;
        }
        const auto [place, fresh] = known.try_emplace(content, free.back());
        entry = place->second;
        if (!fresh) continue;
        free.pop_back();
        copy(l, b, shard, first, entry);
      }
    }
    return l;
  }

 private:
  void set_layout(Local& l, Store store) const {
    const std::int64_t size = l.pages.size, heads = kv_heads;
    kernels::KvRows &kr = l.k_rows, &vr = l.v_rows;
    if (store == Store::rows) {
      kr = vr = {nullptr, stride, dim};
      kr.page_stride = vr.page_stride = size * stride + kGap;
      return;
    }
    kr.page_stride = vr.page_stride = size * heads * dim + kGap;
    int x = static_cast<int>(16 / size_of(k.dtype));
    while (dim % x != 0) x /= 2;
    if (store == Store::x_packed) {
      kr.row_stride = x;
      kr.head_stride = vr.head_stride = dim * size;
      kr.chunk = x;
      kr.chunk_stride = size * x;
      vr.row_stride = 1;
      vr.dim_stride = size;
      vr.chunk_stride = 8 * size;
    } else {
      kr.row_stride = 1;
      kr.head_stride = size;
      kr.dim_stride = heads * size;
      kr.chunk_stride = 8 * heads * size;
      vr.row_stride = 4;
      vr.head_stride = dim * size;
      vr.chunk = 4;
      vr.chunk_stride = 4 * size;
    }
  }

  /// The contents of the keys that some row sees, as a name; empty where there are none.
  std::string content_of(int b, const Shard& shard, std::int64_t first, int size) const {
    std::string content;
    const std::size_t row = stride * size_of(k.dtype);
    for (std::int64_t i = first; i < std::min(first + size, shard.local_len(kv_len[b])); ++i) {
      const std::int64_t position = shard.position(i, kv_len[b]);
      if (!seen[b][position]) continue;
      const std::int64_t at = (start[b] + position) * row;
      content += std::to_string(i - first);
      content.append(reinterpret_cast<const char*>(k.bytes.data()) + at, row);
      content.append(reinterpret_cast<const char*>(v.bytes.data()) + at, row);
    }
    return content;
  }

  void copy(Local& l, int b, const Shard& shard, std::int64_t first, std::int64_t page) const {
    const std::int64_t end = std::min(first + l.pages.size, shard.local_len(kv_len[b]));
    const std::int64_t bytes = size_of(k.dtype);
    for (std::int64_t i = first; i < end; ++i) {
      const std::int64_t position = shard.position(i, kv_len[b]);
      if (!seen[b][position]) continue;
      for (int h = 0; h < kv_heads; ++h) {
        for (int d = 0; d < dim; ++d) {
          const std::int64_t from = (start[b] + position) * stride + h * dim + d;
          const auto put = [&](Array& to, const kernels::KvRows& rows, const Array& whole) {
            const std::int64_t at = page * rows.page_stride + (i - first) * rows.row_stride +
                                    h * rows.head_stride + rows.column(d);
            std::memcpy(to.bytes.data() + at * bytes, whole.bytes.data() + from * bytes, bytes);
          };
          put(l.k, l.k_rows, k);
          put(l.v, l.v_rows, v);
        }
      }
    }
  }
};

}  // namespace longspan::tests
