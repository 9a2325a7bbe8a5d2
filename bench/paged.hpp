// Attention over a paged cache, ready to be called again and again, and its judge.
//
//     Decode decode(Device::cuda, ops, {.heads = 32, ...}, {.page = 16});
//     decode(0, stream);          queues one call
//     decode.judge().right(bf16)  a few rows against float64
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <vector>

#include "bench/data.hpp"
#include "longspan/buffer.hpp"
#include "longspan/serving.hpp"

namespace longspan::bench {

/// `batch` sequences of q_len new tokens each, kv_len keys with them.
struct Sizes {
  int heads, kv_heads, batch;
  std::int64_t q_len, kv_len;
  int dim = 128;
  DType dtype = bf16;
};

/// Common to decode and chunked prefill: queries, lengths, output, workspace.
class Problem {
 public:
  Problem(Device device, Sizes sizes, const CacheShape& shape, std::int64_t cached,
          std::int64_t window = 0)
      : size(sizes), cache(device, shape, sizes.batch, cached, 21), window_(window) {
    const std::int64_t tokens = size.batch * size.q_len;
    q = Array(device, {20, size.dtype}, {tokens, size.heads, size.dim});
    out = Array::nan(device, size.dtype, {tokens, size.heads, size.dim});
    std::vector<std::int32_t> starts(size.batch + 1);
    for (int b = 0; b <= size.batch; ++b) starts[b] = static_cast<std::int32_t>(b * size.q_len);
    starts_ = Numbers<std::int32_t>(device, std::move(starts));
    lens_ = Numbers<std::int32_t>(
        device, std::vector<std::int32_t>(size.batch, static_cast<std::int32_t>(size.kv_len)));
  }

  void give(PagedAttention& args) const {
    args.q = q.view;
    cache.give(args);
    args.query_start = starts_.view();
    args.kv_len = lens_.view();
    args.max_kv_len = size.kv_len;
    args.max_query_len = size.q_len;
    args.out = out.view;
    args.dtypes.compute = size.dtype;
    args.mask = {.causal = true, .window = window_};
  }
  /// With the workspace that the call needs, full of NaN.
  template <class Args>
  void finish(const ServingOps& ops, Args& args) {
    workspace_ = Buffer(q.view.device, ops.workspace_bytes(args));
    if (workspace_.bytes() > 0)
      workspace_.upload(std::vector<std::byte>(workspace_.bytes(), std::byte{0xff}).data());
    args.attention.workspace = {workspace_.data(), workspace_.bytes()};
  }

  /// A few rows of the result; `key(b, j, head, d)` and `value` are elements of the whole sequence.
  template <class Key, class Value>
  Judge judge(const Key& key, const Value& value) const {
    const std::vector<std::byte> result = out.download();
    std::vector<std::int64_t> sample;  // (row of the batch) * heads + head
    for (int b : {0, size.batch / 2, size.batch - 1})
      for (std::int64_t t : {std::int64_t{0}, size.q_len - 1})
        for (int head : {0, size.heads / 2 + 1, size.heads - 1})
          sample.push_back((b * size.q_len + t) * size.heads + head);
    std::sort(sample.begin(), sample.end());
    sample.erase(std::unique(sample.begin(), sample.end()), sample.end());

    std::vector<Judge> found(sample.size());
    in_parallel(
        static_cast<std::int64_t>(sample.size()), [&](std::int64_t begin, std::int64_t end) {
          for (std::int64_t i = begin; i < end; ++i) {
            const int head = static_cast<int>(sample[i] % size.heads);
            const int kv_head = head / (size.heads / size.kv_heads);
            const std::int64_t row = sample[i] / size.heads;
            const int b = static_cast<int>(row / size.q_len);
            std::vector<double> query(size.dim);
            for (int d = 0; d < size.dim; ++d) query[d] = q.values(sample[i] * size.dim + d);
            const Mask mask{.causal = true, .window = window_};
            const Interval seen =
                mask.visible(size.kv_len - size.q_len + row % size.q_len, size.kv_len);
            const std::vector<double> exact = attend_exactly(
                seen.begin, seen.end, size.dim,
                [&](std::int64_t j) {
                  double product = 0;
                  for (int d = 0; d < size.dim; ++d) product += query[d] * key(b, j, kv_head, d);
                  return product / std::sqrt(static_cast<double>(size.dim));
                },
                [&](std::int64_t j, int d) { return value(b, j, kv_head, d); });
            for (int d = 0; d < size.dim; ++d)
              found[i].compare(load_element(result.data(), size.dtype, sample[i] * size.dim + d),
                               exact[d]);
          }
        });
    Judge all;
    for (const Judge& one : found) all.add(one);
    return all;
  }

  nlohmann::ordered_json describe(const char* section) const {
    return {{"section", section},
            {"heads", size.heads},
            {"kv_heads", size.kv_heads},
            {"dim", size.dim},
            {"dtype", name(size.dtype)},
            {"kv_dtype", name(cache.shape.dtype)},
            {"batch", size.batch},
            {"tokens", size.q_len},
            {"kv_len", size.kv_len},
            {"page", cache.shape.page},
            {"layout", name(cache.shape.layout)},
            {"table", cache.shape.permuted ? "permuted" : "identity"},
            {"window", window_}};
  }

  Sizes size;
  Cache cache;
  Array q, out;

 private:
  std::int64_t window_;
  Numbers<std::int32_t> starts_, lens_;
  Buffer workspace_;
};

/// Decode: all keys, the new tokens' too, are in the cache.
class Decode : public Problem {
 public:
  Decode(Device device, const ServingOps& ops, Sizes sizes, const CacheShape& shape,
         std::int64_t window = 0)
      : Problem(device, sizes, shape, sizes.kv_len, window), ops_(ops) {
    give(args_.attention);
    finish(ops, args_);
  }
  void operator()(int, Stream stream) const { ops_.segmented_attention(args_, stream); }
  Judge judge() const {
    return Problem::judge(
        [&](int b, std::int64_t j, int head, int d) { return cache.k(b, j, head, d); },
        [&](int b, std::int64_t j, int head, int d) { return cache.v(b, j, head, d); });
  }

 private:
  const ServingOps& ops_;
  SegmentedAttention args_;
};

/// Chunked prefill: the context is in the cache, the new keys have the layout of the queries.
class Chunk : public Problem {
 public:
  Chunk(Device device, const ServingOps& ops, Sizes sizes, const CacheShape& shape)
      : Problem(device, sizes, shape, sizes.kv_len - sizes.q_len),
        ops_(ops),
        k_(device, {30, sizes.dtype}, {sizes.batch * sizes.q_len, sizes.kv_heads, sizes.dim}),
        v_(device, {31, sizes.dtype}, {sizes.batch * sizes.q_len, sizes.kv_heads, sizes.dim}) {
    give(args_.attention);
    args_.k = k_.view;
    args_.v = v_.view;
    finish(ops, args_);
  }
  void operator()(int, Stream stream) const { ops_.context_attention(args_, stream); }
  Judge judge() const {
    const std::int64_t context = size.kv_len - size.q_len;
    const auto new_row = [&](const Array& array, int b, std::int64_t j, int head, int d) {
      const std::int64_t row = b * size.q_len + j - context;
      return array.values((row * size.kv_heads + head) * size.dim + d);
    };
    return Problem::judge(
        [&](int b, std::int64_t j, int head, int d) {
          return j < context ? cache.k(b, j, head, d) : new_row(k_, b, j, head, d);
        },
        [&](int b, std::int64_t j, int head, int d) {
          return j < context ? cache.v(b, j, head, d) : new_row(v_, b, j, head, d);
        });
  }
  double operations() const {
    const double rows = static_cast<double>(size.q_len);
    const double context = static_cast<double>(size.kv_len) - rows;
    return 4.0 * size.heads * size.dim * size.batch * (rows * context + rows * rows / 2);
  }

 private:
  const ServingOps& ops_;
  Array k_, v_;
  ContextAttention args_;
};

}  // namespace longspan::bench
