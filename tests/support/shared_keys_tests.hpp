// A batch whose sequences share their keys: [batch, capacity, kv_heads, dim] with a stride of 0
// between sequences, as for samples of one prompt. The same bits as from a copy for each sequence,
// on every device. Calls that would write to them are refused by name.
#pragma once

#include <string>

#include "longspan/attention.hpp"
#include "longspan/error.hpp"
#include "tests/support/on_device.hpp"

namespace longspan::tests {

class SharedKeys : public OnDevice {
 protected:
  static constexpr int kHeads = 4, kKvHeads = 2, kDim = 64, kBatch = 3, kCapacity = 200;

  /// Values of order 1 in `dtype`.
  std::vector<std::byte> values(DType dtype, std::int64_t count) {
    std::vector<std::byte> bytes(static_cast<std::size_t>(count) * size_of(dtype));
    for (std::int64_t i = 0; i < count; ++i) store_element(bytes.data(), dtype, i, normal());
    return bytes;
  }

  /// One prompt's keys, and a copy of them for each sequence.
  struct Caches {
    std::vector<std::byte> one, copies;
  };
  Caches caches(DType dtype) {
    Caches c{values(dtype, std::int64_t{kCapacity} * kKvHeads * kDim), {}};
    for (int b = 0; b < kBatch; ++b) c.copies.insert(c.copies.end(), c.one.begin(), c.one.end());
    return c;
  }

  Tensor cache(std::byte* data, DType dtype, bool shared) const {
    Tensor t(data, dtype, {kBatch, kCapacity, kKvHeads, kDim}, device());
    if (shared) t.stride[0] = 0;
    return t;
  }
};

TEST_F(SharedKeys, TheBitsOfACopyForEachSequence) {
  for (DType dtype : {fp32, bf16})
    for (const std::vector<std::int32_t>& query_len :
         {std::vector<std::int32_t>{1, 1, 1}, {2, 9, 1}, {40, 1, 33}}) {
      const std::vector<std::int32_t> kv_len{150, 57, kCapacity};
      std::vector<std::int32_t> starts{0};
      for (std::int32_t n : query_len) starts.push_back(starts.back() + n);
      const std::int64_t tokens = starts.back(), elements = tokens * kHeads * kDim;
      Attention layer(self(device()), {.heads = kHeads,
                                       .kv_heads = kKvHeads,
                                       .head_dim = kDim,
                                       .dtypes = {.compute = dtype},
                                       .mask = {.causal = true},
                                       .limits = {.max_tokens = tokens, .max_batch = kBatch},
                                       .threads = 2,
                                       .debug = {.check_arrays = true}});
      const Caches k = caches(dtype), v = caches(dtype);
      const auto q = on_device(values(dtype, elements));
      const auto query_start = on_device(starts), lengths = on_device(kv_len);
      std::vector<std::vector<std::byte>> results;
      for (const bool shared : {false, true}) {
        const auto keys = on_device(shared ? k.one : k.copies);
        const auto vals = on_device(shared ? v.one : v.copies);
        const auto out = poisoned<std::byte>(elements * size_of(dtype));
        layer.run({.q = Tensor(q.data(), dtype, {tokens, kHeads, kDim}, device()),
                   .k = cache(keys.data(), dtype, shared),
                   .v = cache(vals.data(), dtype, shared),
                   .out = Tensor(out.data(), dtype, {tokens, kHeads, kDim}, device()),
                   .query_start = Tensor(query_start.data(), {kBatch + 1}, device()),
                   .kv_len = Tensor(lengths.data(), {kBatch}, device())});
        layer.wait();
        results.push_back(out.values());
      }
      EXPECT_EQ(results[0], results[1]) << name(dtype) << " " << query_len[1];
      EXPECT_FALSE(std::isnan(load_element(results[1].data(), dtype, 0)));
    }
}

TEST_F(SharedKeys, NothingIsAppendedToThem) {
  const Caches k = caches(fp32), v = caches(fp32);
  const auto keys = on_device(k.copies), vals = on_device(v.copies);
  const auto rows = on_device(values(fp32, kBatch * kKvHeads * kDim));
  const auto query_start = on_device(std::vector<std::int32_t>{0, 1, 2, 3});
  const auto lengths = on_device(std::vector<std::int32_t>{10, 20, 30});
  Attention layer(self(device()), {.heads = kKvHeads,
                                   .kv_heads = kKvHeads,
                                   .head_dim = kDim,
                                   .dtypes = {.compute = fp32},
                                   .limits = {.max_tokens = kBatch, .max_batch = kBatch},
                                   .threads = 1});
  const Tensor added(rows.data(), fp32, {kBatch, kKvHeads, kDim}, device());
  Append append{.new_k = added,
                .new_v = added,
                .k = cache(keys.data(), fp32, false),
                .v = cache(vals.data(), fp32, false),
                .query_start = Tensor(query_start.data(), {kBatch + 1}, device()),
                .kv_len = Tensor(lengths.data(), {kBatch}, device())};
  const auto refuse = [&](const char* text) {
    EXPECT_NE(refusal([&] { layer.append(append); }).find(text), std::string::npos) << text;
    EXPECT_EQ(keys.values(), k.copies);
    EXPECT_EQ(vals.values(), v.copies);
  };
  append.k.stride[0] = append.v.stride[0] = 0;
  refuse("k [3, 200, 2, 64] with strides [0, 128, 64, 1] is written, and its elements overlap");
  append.k.stride[0] = append.v.stride[0] = 10 * kKvHeads * kDim;  // sequences overlap
  refuse("is written, and its elements overlap");
  append.k.stride[0] = append.v.stride[0] = -kKvHeads * kDim;
  refuse("has stride -128 in dimension 0; strides are not negative");
  append.k = append.v = cache(keys.data(), fp32, false);
  refuse("new_v is given, but v is the first columns of k: leave it out");
  append.v.data = keys.data() + kDim * size_of(fp32);  // the next head
  refuse("v overlaps k: it must lie apart");
}

}  // namespace longspan::tests
