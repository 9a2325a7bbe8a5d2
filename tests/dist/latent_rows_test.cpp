// Latent keys in rows that carry their scales (RowFormat), of every format: by every strategy as
// float64 of the numbers as they are stored, contiguous and in pages whose other bytes are NaN;
// appended by each rank; resharded byte for byte; refusals.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "longspan/buffer.hpp"
#include "longspan/longspan.hpp"
#include "longspan/reshard.hpp"
#include "longspan/stored_row.hpp"
#include "tests/dist/latent_error.hpp"
#include "tests/dist/world.hpp"
#include "tests/support/message.hpp"

namespace longspan::tests {
namespace {

constexpr DType kFormats[] = {DType::latent656, DType::latent656_pow2, DType::latent584,
                              DType::latent528, DType::latent352};

struct RowShape {
  DType format = DType::latent656;
  DType compute = fp32;
  int heads = 8;
  std::int64_t keys = 260, rows = 3;
  int page = 0;  // keys in a page; 0: contiguous
  Sharding rule{Layout::contiguous, kSegment};
};

using Bytes = std::vector<std::byte>;

/// One sequence of keys of the whole, as bytes, and this rank's part of it.
class LatentRows : public testing::Test {
 protected:
  LatentRows() : world(test_world()) {}

  void make(const RowShape& given) {
    s = given;
    f = row_format_of(s.format);
    random_.seed(shared_seed(world));
    q = normals(s.rows * s.heads * f.dim);
    if (s.compute == bf16)
      for (float& x : q) x = rounded(x);
    stored.assign(static_cast<std::size_t>(s.keys * f.bytes), {});
    k.assign(static_cast<std::size_t>(s.keys * f.dim), NAN);
    for (std::int64_t i = 0; i < s.keys; ++i) {
      const StoredRow row = dense_row(stored, i);
      draw(row);
      for (int c = 0; c < f.dim; ++c)
        k[static_cast<std::size_t>(i * f.dim + c)] = load_number(row, f, c);
    }
  }

  Options options(const std::string& strategy) const {
    Options o{.heads = s.heads,
              .kv_heads = 1,
              .head_dim = f.dim,
              .value_dim = f.value_dim,
              .values_in_keys = true,
              .dtypes = {.compute = s.compute, .kv = s.format},
              .mask = {.causal = true},
              .keys = s.rule,
              .strategy = strategy,
              .threads = 1};
    o.limits.max_tokens = s.rows;
    o.limits.max_kv_len = s.keys;
    return o;
  }

  Shard shard() const { return s.rule.resolve(s.keys, world.rank(), world.size()); }
  std::int64_t own_keys() const { return shard().local_len(s.keys); }
  std::int64_t pages() const { return s.page > 0 ? (own_keys() + s.page - 1) / s.page + 1 : 0; }
  /// Pages are a little longer than their rows, as vLLM's are.
  std::int64_t page_bytes() const { return std::int64_t{s.page} * f.bytes + 64; }

  /// This rank's cache: its rows, in pages in reverse order. Whatever is not a row is NaN.
  Bytes cache(bool filled) const {
    const std::int64_t own = own_keys();
    Bytes memory(static_cast<std::size_t>(s.page > 0 ? pages() * page_bytes() : own * f.bytes),
                 std::byte{0xff});
    for (std::int64_t i = 0; filled && i < own; ++i)
      copy_row(dense_row(stored, shard().position(i, s.keys)), cache_row(memory, i));
    return memory;
  }
  StoredRow cache_row(const Bytes& memory, std::int64_t i) const {
    if (s.page == 0) return dense_row(memory, i);
    auto* const at =
        const_cast<std::byte*>(memory.data()) + (pages() - 1 - i / s.page) * page_bytes();
    const std::int64_t row = i % s.page;
    if (f.apart == 0) return {at + row * f.bytes, at + row * f.bytes + f.scales_at};
    return {at + row * f.data_bytes(), at + s.page * f.data_bytes() + row * f.apart};
  }

  struct Given {
    Buffer cache, table;
    AttentionArgs args;
  };
  Given given(const Bytes& memory) const {
    Given g;
    g.cache = on_device(memory);
    if (s.page == 0) {
      g.args.k = Tensor(g.cache.data(), DType::uint8, {own_keys(), 1, f.bytes}, world.device());
      return g;
    }
    std::vector<std::int32_t> table;
    for (std::int64_t i = 0; i < pages(); ++i)
      table.push_back(static_cast<std::int32_t>(pages() - 1 - i));
    g.table = on_device(table);
    g.args.k = Tensor(g.cache.data(), DType::uint8, {pages(), s.page, 1, f.bytes},
                      {page_bytes(), f.bytes, f.bytes, 1}, world.device());
    g.args.block_table = Tensor(g.table.data(), DType::int32, {1, pages()}, world.device());
    return g;
  }

  /// out and lse of a fresh layer, which must write all of them.
  std::vector<float> run(const std::string& strategy, const Bytes& memory) {
    Attention layer(world, options(strategy));
    const std::int64_t count = s.rows * s.heads;
    std::vector<float> out(static_cast<std::size_t>(count * f.value_dim), NAN),
        lse(static_cast<std::size_t>(count), NAN);
    Given g = given(memory);
    const Buffer rows = on_device(typed(q));
    Buffer to = on_device(typed(out)), sums = on_device(lse);
    AttentionArgs& args = g.args;
    args.q = Tensor(rows.data(), s.compute, {s.rows, s.heads, f.dim}, world.device());
    args.out = Tensor(to.data(), s.compute, {s.rows, s.heads, f.value_dim}, world.device());
    args.lse = Lse::tokens_heads(Tensor(sums.data(), fp32, {s.rows, s.heads}, world.device()));
    args.total_keys = s.keys;
    layer.run(args);
    layer.wait();
    Bytes result = typed(out);
    to.download(result.data());
    sums.download(lse.data());
    for (std::int64_t i = 0; i < std::ssize(out); ++i)
      out[static_cast<std::size_t>(i)] = load_element(result.data(), s.compute, i);
    out.insert(out.end(), lse.begin(), lse.end());
    return out;
  }

  /// The largest difference of out and lse from float64 of `keys`.
  double off(const std::vector<float>& found, const std::vector<float>& keys) const {
    return latent_error(q, keys, found, {s.rows, s.heads, s.keys, f.dim, f.value_dim});
  }
  /// Results of bf16 are rounded once: half of the last of 8 bits of numbers up to 4.
  double bound() const { return s.compute == bf16 ? 0x1p-7 : 3e-5; }

  // ---- bytes ----

  StoredRow dense_row(const Bytes& memory, std::int64_t i) const {
    auto* const at = const_cast<std::byte*>(memory.data()) + i * f.bytes;
    return {at, at + f.scales_at};
  }
  /// The bytes of a row: its data, and its scales where they are apart.
  void copy_row(const StoredRow& from, const StoredRow& to) const {
    std::copy_n(from.data, f.apart == 0 ? f.bytes : f.data_bytes(), to.data);
    if (f.apart != 0) std::copy_n(from.scales, f.apart, to.scales);
  }
  bool same_row(const StoredRow& a, const StoredRow& b) const {
    const int data = f.apart == 0 ? f.bytes : f.data_bytes();
    return std::equal(a.data, a.data + data, b.data) &&
           (f.apart == 0 || std::equal(a.scales, a.scales + f.apart, b.scales));
  }
  /// Any codes but NaN, scales of about 1 / 100 that are not all powers of two, numbers of order 1.
  void draw(const StoredRow& row) {
    for (int i = 0; i < f.data_bytes(); ++i) row.data[i] = std::byte{0};
    const int bytes = f.code == Code::fp8 ? f.coded : f.coded / 2;
    for (int i = 0; i < bytes; ++i) {
      row.data[i] = static_cast<std::byte>(random_() % 256);
      if (f.code == Code::fp8 && (row.data[i] & std::byte{0x7f}) == std::byte{0x7f})
        row.data[i] = std::byte{0x38};
    }
    for (int g = 0; g < f.coded / f.group; ++g) {
      if (f.scale == GroupScale::single)
        store_element(row.scales, fp32, g,
                      0.002f + 0.006f * static_cast<float>(random_() % 97) / 97);
      else if (f.scale == GroupScale::power)
        row.scales[g] = static_cast<std::byte>(117 + random_() % 3);  // to 2^-8
      else
        row.scales[g] = static_cast<std::byte>(0x20 + random_() % 16);  // 1 / 8 to 1 / 2
    }
    const std::vector<float> others = normals(f.dim - f.coded);
    for (int c = f.coded; c < f.dim; ++c)
      store_number(row, f, c, 1, others[static_cast<std::size_t>(c - f.coded)]);
  }

  Bytes typed(const std::vector<float>& values) const {
    Bytes bytes(values.size() * size_of(s.compute));
    for (std::int64_t i = 0; i < std::ssize(values); ++i)
      store_element(bytes.data(), s.compute, i, values[static_cast<std::size_t>(i)]);
    return bytes;
  }
  static float rounded(float value) {
    std::uint16_t bits = 0;
    store_element(&bits, bf16, 0, value);
    return load_element(&bits, bf16, 0);
  }
  template <class T>
  Buffer on_device(const std::vector<T>& values) const {
    Buffer memory(world.device(), std::max<std::size_t>(1, values.size() * sizeof(T)));
    if (!values.empty()) memory.upload(values.data());
    return memory;
  }
  std::size_t at(std::int64_t row, int d) const {
    return static_cast<std::size_t>(row * f.dim + d);
  }
  std::vector<float> normals(std::int64_t count) {
    std::vector<float> values(static_cast<std::size_t>(count));
    for (float& value : values) value = normal_(random_);
    return values;
  }

  Communicator world;
  RowShape s;
  RowFormat f;
  std::vector<float> q, k;  // [rows, heads, dim], [keys, dim]
  Bytes stored;             // [keys, bytes]

 private:
  std::mt19937_64 random_;
  std::normal_distribution<float> normal_;
};

TEST_F(LatentRows, OfEveryFormatByEveryStrategyAsFloat64OfWhatIsStored) {
  for (const DType format : kFormats) {
    if (format == DType::latent656_pow2) continue;  // read as latent656
    for (const int page : {0, 7}) {
      if (page > 0 && format != DType::latent656 && format != DType::latent584) continue;
      for (const StrategyInfo& info : strategies()) {
        const std::string strategy = info.name;
        const bool moves_keys =
            strategy == "gather-kv" || strategy == "ring-kv" || strategy == "heads";
        if (format != DType::latent656 && strategy != "gather-states" && !moves_keys) continue;
        SCOPED_TRACE(strategy + " " + name(format) + " page " + std::to_string(page));
        make({.format = format,
              .compute = page == 0 ? fp32 : bf16,
              .heads = info.levels == 2 ? 8 : 16,
              .keys = 130,
              .page = page,
              .rule = {page == 0 ? Layout::contiguous : Layout::interleaved, 5}});
        try {
          EXPECT_LT(off(run(strategy, cache(true)), k), bound());
        } catch (const Unsupported&) {
          EXPECT_NE(strategy, "gather-states");
        }
      }
    }
  }
}

/// Tiles of every kind: few rows, rows in lanes, packed segments.
TEST_F(LatentRows, RowsOfAnyNumber) {
  for (const DType format : {DType::latent656, DType::latent584, DType::latent352})
    for (const std::int64_t rows : {1, 9, 70}) {
      make({.format = format, .heads = rows == 1 ? 1 : 4, .keys = 300, .rows = rows, .page = 64});
      EXPECT_LT(off(run("gather-states", cache(true)), k), bound()) << name(format) << rows;
    }
}

/// What nobody sees may be NaN, its scales included.
TEST_F(LatentRows, NanThatNobodySeesStaysAway) {
  for (const DType format : kFormats) {
    make({.format = format, .keys = 200, .rows = 2});
    Options o = options("gather-states");
    Bytes memory = cache(true);
    o.mask.window = 20;
    for (std::int64_t i = 0; i < own_keys(); ++i)
      if (shard().position(i, s.keys) < 150) {
        const StoredRow row = cache_row(memory, i);
        std::fill_n(row.data, f.bytes, std::byte{0xff});
      }
    Attention layer(world, o);
    Given g = given(memory);
    const Buffer rows = on_device(typed(q));
    std::vector<float> out(static_cast<std::size_t>(s.rows * s.heads * f.value_dim), NAN);
    Buffer to = on_device(out);
    g.args.q = Tensor(rows.data(), fp32, {s.rows, s.heads, f.dim}, world.device());
    g.args.out = Tensor(to.data(), fp32, {s.rows, s.heads, f.value_dim}, world.device());
    g.args.total_keys = s.keys;
    layer.run(g.args);
    layer.wait();
    to.download(out.data());
    for (const float x : out) ASSERT_TRUE(std::isfinite(x)) << name(format);
  }
}

/// Each rank writes its own keys of the new ones, with the bytes of the format's rule, and nothing
/// else.
TEST_F(LatentRows, AppendedByTheRule) {
  for (const DType format : {DType::latent656, DType::latent656_pow2, DType::latent584})
    for (const DType compute : {fp32, bf16})
      for (const int page : {0, 5}) {
        SCOPED_TRACE(std::string(name(format)) + " " + name(compute) + " " + std::to_string(page));
        make({.format = format,
              .compute = compute,
              .heads = 2,
              .keys = 40,
              .rows = 40,
              .page = page,
              .rule = {Layout::interleaved, 3}});
        std::vector<float> fresh = normals(s.keys * f.dim);
        for (int c = 0; c < f.dim; ++c) {
          fresh[at(1, c)] = 0;  // the least scale
          fresh[at(2, c)] *= c < f.group ? 1e30f : 1e-30f;
          fresh[at(3, c)] = c % f.group == 0 ? 448 : 1;  // a scale that is a power of two
        }
        if (compute == bf16)
          for (float& x : fresh) x = rounded(x);
        // The rule once more, in other words.
        Bytes wanted(static_cast<std::size_t>(s.keys * f.bytes));
        for (std::int64_t i = 0; i < s.keys; ++i) {
          const StoredRow row = dense_row(wanted, i);
          if (f.apart != 0) row.scales[f.apart - 1] = std::byte{0xff};  // padding stays as it is
          for (int c = 0; c < f.dim; ++c) {
            const int g = c / f.group * f.group;
            float amax = 0;
            for (int n = g; n < std::min(g + f.group, f.coded); ++n)
              amax = std::max(amax, std::abs(fresh[at(i, n)]));
            float scale = std::max(amax / 448.0f, std::numeric_limits<float>::min());
            if (f.rule == ScaleRule::power_of_two)
              scale = std::exp2(std::ceil(std::log2(std::max(amax / 448.0f, 1e-4f))));
            const float x = fresh[at(i, c)];
            if (c >= f.coded) {
              store_element(row.data + f.rest_at, bf16, c - f.coded, x);
            } else {
              store_element(row.data, e4m3, c, x / scale);
              if (f.scale == GroupScale::single)
                store_element(row.scales, fp32, c / f.group, scale);
              else
                row.scales[c / f.group] = static_cast<std::byte>(127 + std::ilogb(scale));
            }
          }
        }
        const Bytes before = cache(false);
        Given g = given(before);
        const Buffer rows = on_device(typed(fresh));
        Attention layer(world, options("gather-states"));
        Append append{.new_k = Tensor(rows.data(), compute, {s.keys, 1, f.dim}, world.device()),
                      .k = g.args.k,
                      .total_keys = s.keys,
                      .block_table = g.args.block_table};
        layer.append(append);
        layer.wait();
        Bytes found = before, right = before;
        g.cache.download(found.data());
        for (std::int64_t i = 0; i < own_keys(); ++i)
          copy_row(dense_row(wanted, shard().position(i, s.keys)), cache_row(right, i));
        EXPECT_TRUE(found == right);
      }
}

/// Rows move with their scales, between pages and contiguous rows.
TEST_F(LatentRows, ReshardedByteForByte) {
  for (const DType format : kFormats)
    for (const bool to_pages : {false, true}) {
      SCOPED_TRACE(std::string(name(format)) + (to_pages ? " to pages" : " from pages"));
      const Sharding dealt{Layout::interleaved, 2}, whole{Layout::contiguous, kSegment};
      const RowShape paged{.format = format, .keys = 90, .page = 6, .rule = dealt};
      RowShape rows{.format = format, .keys = 90, .rule = whole};
      make(to_pages ? rows : paged);
      const Bytes from = cache(true);
      const Given source = given(from);
      ReshardOptions o{
          .kv_heads = 1, .head_dim = f.dim, .value_dim = 0, .dtype = format, .lengths = {s.keys}};
      o.from.rule = s.rule;
      const Bytes kept = stored;
      s = to_pages ? paged : rows;
      o.to.rule = s.rule;
      const Bytes empty = cache(false);
      const Given target = given(empty);
      Reshard reshard(world, o);
      reshard.run({.from = {.k = source.args.k, .block_table = source.args.block_table},
                   .to = {.k = target.args.k, .block_table = target.args.block_table}});
      reshard.wait();
      Bytes found = empty;
      if (!found.empty()) target.cache.download(found.data());
      for (std::int64_t i = 0; i < own_keys(); ++i)
        ASSERT_TRUE(same_row(cache_row(found, i), dense_row(kept, shard().position(i, s.keys))))
            << i;
    }
}

TEST_F(LatentRows, RefusedByName) {
  const Communicator alone = self();
  make({});
  const Options good = options("auto");
  const auto refuse = [&](Options o, const char* why) {
    try {
      Attention layer(alone, o);
      FAIL() << why;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr(why));
    }
  };
  EXPECT_NO_THROW(Attention(alone, good));
  Options o = good;
  o.values_in_keys = false;
  refuse(o, "set values_in_keys");
  o = good;
  o.heads = o.kv_heads = 2;
  refuse(o, "kv_heads 1");
  o = good;
  o.head_dim = 512;
  refuse(o, "its rows have 576 numbers");
  o = good;
  o.dtypes.compute = fp16;
  refuse(o, "compute in bf16 or fp32");
  o = good;
  o.rope.dim = 64;
  refuse(o, "rotate rows before the call");
  o = good;
  o.dropout.p = 0.1;
  refuse(o, "dropout");
  o = good;
  o.dtypes.query = DType::latent656;
  refuse(o, "dtypes.query latent656");

  Attention layer(alone, good);
  std::vector<float> rows(8 * 576), out(8 * 512), scale{1};
  Bytes memory(10 * 656 + 8);
  AttentionArgs args{.q = Tensor(rows.data(), {1, 8, 576}),
                     .k = Tensor(memory.data(), DType::uint8, {10, 1, 656}),
                     .out = Tensor(out.data(), {1, 8, 512}),
                     .total_keys = 10};
  EXPECT_NO_THROW(layer.run(args));
  const auto refuse_run = [&](const AttentionArgs& bad, const char* why) {
    try {
      layer.run(bad);
      FAIL() << why;
    } catch (const InputError& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr(why));
    }
  };
  AttentionArgs bad = args;
  bad.k = Tensor(memory.data(), DType::uint8, {10, 1, 576});
  refuse_run(bad, "uint8 with rows of 656 bytes");
  bad.k = Tensor(memory.data(), e4m3, {10, 1, 656});
  refuse_run(bad, "k is [10, 1, 656] of e4m3");
  bad.k = Tensor(memory.data() + 2, DType::uint8, {10, 1, 656});
  refuse_run(bad, "multiples of 8 bytes");
  bad.k = Tensor(memory.data(), DType::uint8, {9, 1, 656}, {660, 656, 1});
  refuse_run(bad, "multiples of 8 bytes");
  bad = args;
  bad.k_scale = Tensor(scale.data(), {1});
  refuse_run(bad, "rows of latent656 carry their scales");

  for (const DType format : {DType::latent528, DType::latent352}) {
    make({.format = format});
    Attention reader(alone, options("auto"));
    Bytes cache_bytes(static_cast<std::size_t>(10 * f.bytes));
    Append append{.new_k = Tensor(rows.data(), {1, 1, f.dim}),
                  .k = Tensor(cache_bytes.data(), DType::uint8, {10, 1, f.bytes}),
                  .total_keys = 10};
    EXPECT_THROW(reader.append(append), Unsupported);
  }
  EXPECT_THROW(Reshard(alone, {.kv_heads = 1,
                               .head_dim = 576,
                               .value_dim = 512,
                               .dtype = DType::latent656,
                               .lengths = {3}}),
               UsageError);
}

}  // namespace
}  // namespace longspan::tests
