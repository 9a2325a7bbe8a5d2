// New keys and values into a cache, on every device. The whole cache, with gaps and untouched rows,
// must have the bits that a plain loop over the definition of its layout gives.
#pragma once

#include <numeric>

#include "launcher/judge/oracle.hpp"
#include "src/layer/rotation.hpp"
#include "tests/support/on_device.hpp"

namespace longspan::tests {

struct AppendCase {
  enum class Cache { rows, packed, contiguous };
  Cache cache = Cache::rows;
  bool slots = true;  // otherwise by the shard and the table
  DType dtype = DType::bf16, kv_dtype = DType::bf16;
  int kv_heads = 2, dim = 64, page = 16, pages = 40;
  int value_dim = 0;       // 0: dim
  bool keys_only = false;  // values are part of the keys
  int x = 8;               // packed
  int gap = 0;             // elements between rows, heads and pages
  int offset = 0;          // elements
  bool scales = false, per_head = false;
  bool per_key = false;  // scales of each key and kv head, with room between keys and pages
  Shard shard = {};
  RopeOptions rope = {};  // without slots
  std::vector<std::int32_t> query_len = {3, 0, 20, 1}, kv_len = {100, 7, 20, 65};

  /// The scales of a key and of a page, where each key has its own.
  std::int64_t scales_of_key() const { return kv_heads + 1; }
  std::int64_t scales_of_page() const { return page * scales_of_key() + 2; }
  int columns(bool is_key) const { return is_key || value_dim == 0 ? dim : value_dim; }
  std::int64_t tokens() const { return std::accumulate(query_len.begin(), query_len.end(), 0); }
};

inline std::ostream& operator<<(std::ostream& out, const AppendCase& c) {
  return out << "cache " << static_cast<int>(c.cache) << " slots " << c.slots << " "
             << name(c.dtype) << " -> " << name(c.kv_dtype) << " dim " << c.dim << "/"
             << c.columns(false) << (c.keys_only ? " keys only" : "") << " page " << c.page << " x "
             << c.x << " gap " << c.gap << " offset " << c.offset << " scales " << c.scales
             << c.per_head << c.per_key << " " << name(c.shard.layout) << " rope " << c.rope.dim
             << (c.rope.interleaved ? "i" : "");
}

class Append : public OnDevice {
 protected:
  /// The layout of one tensor of the cache, and how many elements it takes.
  struct CacheLayout {
    kernels::KvRows rows;  // without data
    std::int64_t size;
  };
  static CacheLayout layout(const AppendCase& c, bool is_key) {
    kernels::KvRows r;
    const std::int64_t dim = c.columns(is_key), row = dim + c.gap;
    if (c.cache == AppendCase::Cache::contiguous) {
      r.head_stride = row;
      r.row_stride = c.kv_heads * row;
      return {r, c.offset + std::int64_t{c.pages} * c.page * r.row_stride};
    }
    if (c.cache == AppendCase::Cache::rows) {
      r.head_stride = row;
      r.row_stride = c.kv_heads * row;
      r.page_stride = c.page * r.row_stride + c.gap;
    } else if (is_key) {  // [pages, kv_heads, dim / x, page, x]
      r.chunk = c.x;
      r.chunk_stride = std::int64_t{c.page} * c.x;
      r.row_stride = c.x;
      r.head_stride = dim * c.page + c.gap;
      r.page_stride = c.kv_heads * r.head_stride;
    } else {  // [pages, kv_heads, dim, page]
      r.dim_stride = c.page;
      r.chunk_stride = std::int64_t{r.chunk} * c.page;
      r.row_stride = 1;
      r.head_stride = dim * c.page + c.gap;
      r.page_stride = c.kv_heads * r.head_stride;
    }
    return {r, c.offset + c.pages * r.page_stride};
  }

  /// The place of element d of a head's row, from the shapes.
  static std::int64_t place(const AppendCase& c, bool is_key, std::int64_t slot, int head, int d) {
    const std::int64_t page = slot / c.page, row = slot % c.page, dim = c.columns(is_key),
                       width = dim + c.gap;
    if (c.cache == AppendCase::Cache::contiguous)
      return c.offset + (slot * c.kv_heads + head) * width + d;
    if (c.cache == AppendCase::Cache::rows)
      return c.offset + page * (c.page * c.kv_heads * width + c.gap) +
             (row * c.kv_heads + head) * width + d;
    const std::int64_t of_head = (page * c.kv_heads + head) * (dim * c.page + c.gap);
    return c.offset + of_head +
           (is_key ? (d / c.x * c.page + row) * c.x + d % c.x : std::int64_t{d} * c.page + row);
  }

  /// The keys, compared with float64 and one rounding. Whatever is not written stays as it was.
  void expect_rotated(const AppendCase& c, const std::vector<std::byte>& got,
                      const std::vector<std::byte>& fresh, const std::vector<float>& scales,
                      const std::vector<std::int64_t>& slots,
                      const std::vector<std::int32_t>& starts) {
    const std::int64_t width = c.dim + c.gap, row = c.kv_heads * width + c.gap;
    std::vector<std::byte> untouched = got;
    for (std::size_t b = 0; b < c.kv_len.size(); ++b)
      for (std::int64_t t = starts[b]; t < starts[b + 1]; ++t)
        for (int h = 0; h < c.kv_heads && slots[t] >= 0; ++h) {
          Eigen::VectorXd key(c.dim);
          for (int d = 0; d < c.dim; ++d)
            key[d] = load_element(fresh.data(), c.dtype, c.offset + t * row + h * width + d);
          const double size = key.cwiseAbs().maxCoeff();
          launcher::rotate_exactly(key, c.rope, c.kv_len[b] - starts[b + 1] + t);
          const double factor = scales.empty() ? 1.0 : scales[scale_at(c, slots[t], h)];
          for (int d = 0; d < c.dim; ++d) {
            const std::int64_t at = place(c, true, slots[t], h, d);
            double expected = key[d] / factor;
            if (is_fp8(c.kv_dtype))
              expected = std::clamp(expected, -largest(c.kv_dtype), largest(c.kv_dtype));
            ASSERT_NEAR(load_element(got.data(), c.kv_dtype, at), expected,
                        one_rounding(c.kv_dtype, expected, size / factor))
                << c << " token " << t << " element " << d;
            const std::size_t bytes = size_of(c.kv_dtype);
            std::fill_n(untouched.begin() + at * bytes, bytes, std::byte{0xff});
          }
        }
    EXPECT_EQ(untouched, std::vector<std::byte>(got.size(), std::byte{0xff})) << c;
  }

  /// The place of a head's scale among all scales.
  static std::int64_t scale_at(const AppendCase& c, std::int64_t slot, int head) {
    if (!c.per_key) return c.per_head ? head : 0;
    if (c.cache == AppendCase::Cache::contiguous) return slot * c.scales_of_key() + head;
    return slot / c.page * c.scales_of_page() + slot % c.page * c.scales_of_key() + head;
  }

  void expect_right(const AppendCase& c) {
    const std::int64_t tokens = c.tokens();
    const int batch = static_cast<int>(c.kv_len.size());
    const int columns = c.pages / batch;
    const bool contiguous = c.cache == AppendCase::Cache::contiguous;

    // Slots, or the place of a row's position on this rank.
    std::vector<std::int64_t> slots(tokens, -1);
    std::vector<std::int32_t> table(batch * columns), starts{0};
    std::vector<std::int64_t> key_start;
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), random_);
    for (std::int32_t n : c.query_len) starts.push_back(starts.back() + n);
    for (int b = 0; b < batch; ++b)
      key_start.push_back(std::int64_t{b} * (c.pages * c.page / batch));
    if (c.slots) {
      std::vector<std::int64_t> all(c.pages * c.page);
      std::iota(all.begin(), all.end(), 0);
      std::shuffle(all.begin(), all.end(), random_);
      for (std::int64_t t = 0; t < tokens; ++t)
        if (below(5) != 0) slots[t] = all[t];
    } else {
      for (int b = 0; b < batch; ++b)
        for (std::int64_t i = 0; i < c.shard.local_len(c.kv_len[b]); ++i) {
          const std::int64_t t = c.shard.position(i, c.kv_len[b]) - (c.kv_len[b] - c.query_len[b]);
          if (t < 0) continue;
          slots[starts[b] + t] =
              contiguous ? key_start[b] + i
                         : std::int64_t{table[b * columns + i / c.page]} * c.page + i % c.page;
        }
    }

    // New rows: numbers of every size, also past the largest fp8.
    std::vector<std::byte> fresh[2];
    std::vector<float> scales[2];
    std::int64_t widths[2], rows[2];  // elements of a head, and of a token
    for (int n : {0, 1}) {
      const std::int64_t width = widths[n] = c.columns(n == 0) + c.gap;
      const std::int64_t row = rows[n] = c.kv_heads * width + c.gap;
      fresh[n].assign((c.offset + tokens * row) * size_of(c.dtype), std::byte{0xff});
      for (std::int64_t t = 0; t < tokens; ++t)
        for (int h = 0; h < c.kv_heads; ++h)
          for (int d = 0; d < c.columns(n == 0); ++d)
            store_element(fresh[n].data(), c.dtype, c.offset + t * row + h * width + d,
                          normal() * std::exp(3 * normal()));
      const std::int64_t count = c.per_key ? c.pages * c.scales_of_page() : c.kv_heads;
      for (std::int64_t i = 0; i < count; ++i) scales[n].push_back(0.1f + std::abs(normal()));
    }

    kernels::AppendParams p;
    p.dtype = c.dtype;
    p.kv_dtype = c.kv_dtype;
    p.tokens = tokens;
    p.kv_heads = c.kv_heads;
    p.head_dim = c.dim;
    p.value_dim = c.columns(false);
    const auto device_slots = on_device(slots);
    const auto device_table = on_device(table), query_start = on_device(starts),
               kv_len = on_device(c.kv_len);
    const auto device_key_start = on_device(key_start);
    if (c.slots) {
      p.slots = device_slots.data();
    } else {
      p.batch.size = batch;
      p.batch.query_start = query_start.data();
      p.batch.kv_len = kv_len.data();
      p.shard = c.shard;
      if (contiguous)
        p.batch.key_start = device_key_start.data();
      else
        p.pages.table = device_table.data();
    }
    if (!contiguous) {
      p.pages.row_stride = p.pages.columns = columns;
      p.pages.count = c.pages;
      p.pages.size = c.page;
    }
    DeviceArray<std::byte> from[2], cache[2];
    DeviceArray<float> device_scales[2];
    for (int n : {0, 1}) {
      const CacheLayout l = layout(c, n == 0);
      from[n] = on_device(fresh[n]);
      cache[n] = poisoned<std::byte>(l.size * size_of(c.kv_dtype));
      device_scales[n] = on_device(scales[n]);
      if (n == 0 || !c.keys_only)
        (n == 0 ? p.new_k : p.new_v) =
            kernels::Rows{from[n].data() + c.offset * size_of(c.dtype), rows[n], widths[n]};
      kernels::KvRows& to = n == 0 ? p.k : p.v;
      to = l.rows;
      to.data = cache[n].data() + c.offset * size_of(c.kv_dtype);
      if (c.scales)
        (n == 0 ? p.k_scale : p.v_scale) =
            ScaleView(device_scales[n].data(), c.per_key ? c.scales_of_page() : 0,
                      c.per_key ? c.scales_of_key() : 0, c.per_head || c.per_key ? 1 : 0);
    }
    const auto turns = on_device(turns_of(c.rope));
    p.rope.dim = c.rope.dim;
    p.rope.interleaved = c.rope.interleaved;
    p.rope.turns = turns.data();
    backend().append(p, {});

    for (int n : {0, 1}) {
      const std::vector<std::byte> got = cache[n].values();
      std::vector<std::byte> expected(got.size(), std::byte{0xff});
      for (std::int64_t t = 0; t < tokens && !(n == 1 && c.keys_only); ++t)
        for (int h = 0; h < c.kv_heads && slots[t] >= 0; ++h)
          for (int d = 0; d < c.columns(n == 0); ++d) {
            float value =
                load_element(fresh[n].data(), c.dtype, c.offset + t * rows[n] + h * widths[n] + d);
            if (c.scales) value /= scales[n][scale_at(c, slots[t], h)];
            store_element(expected.data(), c.kv_dtype, place(c, n == 0, slots[t], h, d), value);
          }
      if (n == 0 && c.rope.dim > 0)
        expect_rotated(c, got, fresh[0], c.scales ? scales[0] : std::vector<float>{}, slots,
                       starts);
      else
        EXPECT_TRUE(got == expected) << (n == 0 ? "keys of " : "values of ") << c;
    }
  }
};

/// RoPE in halves and interleaved, of an even and an odd number of pairs, by the position of a key.
TEST_F(Append, RotatesKeysBeforeTheyAreRounded) {
  for (auto cache :
       {AppendCase::Cache::rows, AppendCase::Cache::packed, AppendCase::Cache::contiguous})
    for (DType kv_dtype : {bf16, e4m3})
      for (int rotary : {64, 32, 22})
        for (bool interleaved : {false, true}) {
          AppendCase c;
          c.cache = cache;
          c.slots = false;
          c.kv_dtype = kv_dtype;
          c.x = 16 / static_cast<int>(size_of(kv_dtype));
          c.scales = is_fp8(kv_dtype);
          c.per_head = true;
          c.offset = rotary == 32 ? 1 : 0;
          c.rope = {.dim = rotary, .interleaved = interleaved, .base = 100.0f, .scale = 2.0f};
          c.shard = Shard::interleaved(0, 1, 2, 16);
          expect_right(c);
        }
}

TEST_F(Append, EveryLayoutAndTypeByTheSlot) {
  for (auto cache :
       {AppendCase::Cache::rows, AppendCase::Cache::packed, AppendCase::Cache::contiguous})
    for (DType dtype : {fp32, fp16, bf16})
      for (DType kv_dtype : {dtype, e4m3, e5m2})
        for (int gap : {0, 1, 16})
          for (int offset : {0, 1}) {
            AppendCase c;
            c.cache = cache;
            c.dtype = dtype;
            c.kv_dtype = kv_dtype;
            c.gap = gap;
            c.offset = offset;
            c.x = 16 / static_cast<int>(size_of(kv_dtype));
            expect_right(c);
          }
}

TEST_F(Append, AnyPageAndDim) {
  for (auto cache : {AppendCase::Cache::rows, AppendCase::Cache::packed})
    for (int page : {1, 8, 16, 32, 544})
      for (int dim : {16, 24, 80, 128, 256}) {
        AppendCase c;
        c.cache = cache;
        c.page = page;
        c.pages = page < 8 ? 400 : 60;
        c.dim = dim;
        expect_right(c);
      }
  for (int dim : {1, 5, 20}) {  // no eight elements together
    AppendCase c;
    c.dim = dim;
    expect_right(c);
  }
}

TEST_F(Append, ValuesOfAnotherWidthOrInTheKeys) {
  for (auto cache :
       {AppendCase::Cache::rows, AppendCase::Cache::packed, AppendCase::Cache::contiguous})
    for (int value_dim : {24, 20, 136})
      for (bool keys_only : {false, true}) {
        AppendCase c;
        c.cache = cache;
        c.value_dim = value_dim;
        c.keys_only = keys_only;
        expect_right(c);
      }
}

TEST_F(Append, Fp8IsDividedByItsScaleAndSaturates) {
  for (DType dtype : {fp32, fp16, bf16})
    for (DType kv_dtype : {e4m3, e5m2})
      for (bool per_head : {false, true})
        for (auto cache : {AppendCase::Cache::rows, AppendCase::Cache::packed}) {
          AppendCase c;
          c.cache = cache;
          c.dtype = dtype;
          c.kv_dtype = kv_dtype;
          c.scales = true;
          c.per_head = per_head;
          c.x = 16;
          expect_right(c);
        }
}

TEST_F(Append, EachKeyMayHaveItsOwnScales) {
  for (auto cache :
       {AppendCase::Cache::rows, AppendCase::Cache::packed, AppendCase::Cache::contiguous})
    for (bool slots : {false, true})
      for (bool keys_only : {false, true}) {
        AppendCase c;
        c.cache = cache;
        c.slots = slots;
        c.keys_only = keys_only;
        c.kv_dtype = e4m3;
        c.scales = c.per_key = true;
        expect_right(c);
      }
}

TEST_F(Append, ByTheShardAndTheTable) {
  for (auto cache :
       {AppendCase::Cache::rows, AppendCase::Cache::packed, AppendCase::Cache::contiguous})
    for (int ranks : {1, 2, 3})
      for (int rank = 0; rank < ranks; ++rank)
        for (const Shard& shard :
             {Shard::contiguous(0, rank, ranks), Shard::striped(0, rank, ranks),
              Shard::interleaved(0, rank, ranks, 16)}) {
          AppendCase c;
          c.cache = cache;
          c.slots = false;
          c.shard = shard;
          expect_right(c);
        }
}

/// A query longer than its sequence has rows below position 0, which go nowhere.
TEST_F(Append, RowsBelowPositionZeroGoNowhere) {
  AppendCase c;
  c.slots = false;
  c.query_len = {10, 4};
  c.kv_len = {6, 4};
  expect_right(c);
}

}  // namespace longspan::tests
