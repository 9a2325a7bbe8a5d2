// Random tensors whose element i is a function of (seed, i): a reference recomputes what it needs,
// for any place and layout of the tensor, and keeps no copy.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "launcher/problem/random.hpp"
#include "longspan/buffer.hpp"
#include "longspan/element.hpp"
#include "longspan/serving.hpp"
#include "longspan/storage.hpp"
#include "longspan/tensor.hpp"

namespace longspan::bench {

/// f(begin, end) on every core.
template <class F>
void in_parallel(std::int64_t count, const F& f) {
  const std::int64_t threads = std::clamp<std::int64_t>(std::thread::hardware_concurrency(), 1,
                                                        std::max<std::int64_t>(count, 1));
  std::vector<std::thread> others;
  for (std::int64_t t = 1; t < threads; ++t)
    others.emplace_back([&, t] { f(count * t / threads, count * (t + 1) / threads); });
  f(0, count / threads);
  for (std::thread& thread : others) thread.join();
}

/// Elements of a random tensor (launcher/problem/random.hpp), rounded to the type.
struct Values {
  std::uint64_t seed = 0;
  DType dtype = DType::fp32;

  launcher::RandomTensor exact() const { return {seed}; }
  /// The element as stored.
  double operator()(std::int64_t i) const {
    return launcher::rounded(dtype, exact()(static_cast<std::uint64_t>(i)));
  }
};

/// A dense tensor that owns its memory: random, or NaN (every byte 0xff).
class Array {
 public:
  Array() = default;
  Array(Device device, Values of, std::initializer_list<std::int64_t> shape)
      : Array(device, of.dtype, shape) {
    values = of;
    const std::size_t size = size_of(of.dtype);
    in_parallel(view.size(), [&](std::int64_t begin, std::int64_t end) {
      values.exact().store(staging_.get() + begin * size, values.dtype, begin, end - begin);
    });
    finish();
  }
  static Array nan(Device device, DType dtype, std::initializer_list<std::int64_t> shape) {
    Array array(device, dtype, shape);
    std::memset(array.staging_.get(), 0xff, array.buffer_.bytes());
    array.finish();
    return array;
  }

  std::vector<std::byte> download() const {
    std::vector<std::byte> bytes(buffer_.bytes());
    buffer_.download(bytes.data());
    return bytes;
  }

  Tensor view;
  Values values;

 private:
  Array(Device device, DType dtype, std::initializer_list<std::int64_t> shape)
      : view(nullptr, dtype, shape, device),
        buffer_(device, view.size() * size_of(dtype)),
        staging_(std::make_unique_for_overwrite<std::byte[]>(buffer_.bytes())) {
    view.data = buffer_.data();
  }
  void finish() {
    buffer_.upload(staging_.get());
    staging_.reset();
  }

  Buffer buffer_;
  std::unique_ptr<std::byte[]> staging_;
};

/// Numbers of the host on the device; the host's copy stays.
template <class T>
class Numbers {
 public:
  Numbers() = default;
  Numbers(Device device, std::vector<T> values)
      : host(std::move(values)), buffer_(device, host.size() * sizeof(T)) {
    buffer_.upload(host.data());
  }
  const T* data() const { return static_cast<const T*>(buffer_.data()); }
  /// `count` of them from `first` on, or all.
  Tensor view() const { return view(0, static_cast<std::int64_t>(host.size())); }
  Tensor view(std::int64_t first, std::int64_t count) const {
    return {data() + first, {count}, buffer_.device()};
  }

  std::vector<T> host;

 private:
  Buffer buffer_;
};

enum class PageLayout { rows, x_packed };
constexpr const char* name(PageLayout layout) {
  return layout == PageLayout::rows ? "rows" : "x-packed";
}

/// The properties of a paged cache.
struct CacheShape {
  int kv_heads = 8;
  int dim = 128;
  DType dtype = DType::bf16;
  int page = 16;
  PageLayout layout = PageLayout::rows;
  bool permuted = true;  // pages in random order; else page i of the cache is the i-th in use
};

/// `batch` sequences of `kv_len` keys each. fp8 elements mean x times a scale.
class Cache {
 public:
  static constexpr float kScaleK = 0.75f, kScaleV = 1.25f;

  Cache(Device device, CacheShape s, int batch, std::int64_t kv_len, std::uint64_t seed)
      : shape(s), columns_((kv_len + s.page - 1) / s.page) {
    const std::int64_t pages = columns_ * batch;
    const Values k{seed, s.dtype}, v{seed + 1, s.dtype};
    if (s.layout == PageLayout::rows) {
      k_ = Array(device, k, {pages, s.page, s.kv_heads, s.dim});
      v_ = Array(device, v, {pages, s.page, s.kv_heads, s.dim});
    } else {
      const int x = storage_of(s.dtype).elements(16);
      k_ = Array(device, k, {pages, s.kv_heads, s.dim / x, s.page, x});
      v_ = Array(device, v, {pages, s.kv_heads, s.dim, s.page});
    }
    std::vector<std::int32_t> table(pages);
    std::iota(table.begin(), table.end(), 0);
    if (s.permuted) std::shuffle(table.begin(), table.end(), std::mt19937_64(seed));
    table_ = Numbers<std::int32_t>(device, std::move(table));
    if (storage_of(s.dtype).needs_scale) scales_ = Numbers<float>(device, {kScaleK, kScaleV});
  }

  void give(PagedAttention& args) const {
    args.k_cache = k_.view;
    args.v_cache = v_.view;
    const std::int64_t batch = static_cast<std::int64_t>(table_.host.size()) / columns_;
    args.block_table = {table_.data(), {batch, columns_}, k_.view.device};
    if (scales_.host.empty()) return;
    args.k_scale = scales_.view(0, 1);
    args.v_scale = scales_.view(1, 1);
  }

  /// Element d of key (value) `key` of sequence b.
  double k(int b, std::int64_t key, int head, int d) const {
    const auto& step = k_.view.stride;
    const std::int64_t row = key % shape.page, at = page(b, key) * step[0];
    const double factor = scales_.host.empty() ? 1 : kScaleK;
    if (shape.layout == PageLayout::rows)
      return factor * k_.values(at + row * step[1] + head * step[2] + d);
    const std::int64_t x = step[3];
    return factor * k_.values(at + head * step[1] + d / x * step[2] + row * x + d % x);
  }
  double v(int b, std::int64_t key, int head, int d) const {
    const auto& step = v_.view.stride;
    const std::int64_t row = key % shape.page, at = page(b, key) * step[0];
    const double factor = scales_.host.empty() ? 1 : kScaleV;
    if (shape.layout == PageLayout::rows)
      return factor * v_.values(at + row * step[1] + head * step[2] + d);
    return factor * v_.values(at + head * step[1] + d * step[2] + row);
  }

  CacheShape shape;

 private:
  std::int64_t page(int b, std::int64_t key) const {
    return table_.host[b * columns_ + key / shape.page];
  }

  std::int64_t columns_ = 0;
  Array k_, v_;
  Numbers<std::int32_t> table_;
  Numbers<float> scales_;
};

/// One (row, head) in float64 over the keys [begin, end): `product(j)` is the score, `value(j, d)`
/// an element.
template <class Score, class Value>
std::vector<double> attend_exactly(std::int64_t begin, std::int64_t end, int dim,
                                   const Score& score, const Value& value) {
  std::vector<double> weights(end - begin), out(dim, 0.0);
  double top = -std::numeric_limits<double>::infinity(), sum = 0;
  for (std::int64_t j = begin; j < end; ++j) top = std::max(top, weights[j - begin] = score(j));
  for (double& weight : weights) sum += weight = std::exp(weight - top);
  for (std::int64_t j = begin; j < end; ++j)
    for (int d = 0; d < dim; ++d) out[d] += weights[j - begin] / sum * value(j, d);
  return out;
}

/// How far rows of a result are from float64.
class Judge {
 public:
  void compare(double found, double exact) {
    error2_ += (found - exact) * (found - exact);
    exact2_ += exact * exact;
  }
  void add(const Judge& other) {
    error2_ += other.error2_;
    exact2_ += other.exact2_;
  }
  double relative() const { return std::sqrt(error2_ / exact2_); }
  /// Weights and results of 16 bits are each off by at most 2^-9; a NaN is never right.
  bool right(DType dtype) const { return relative() < (dtype == DType::fp32 ? 1e-5 : 5e-3); }

 private:
  double error2_ = 0, exact2_ = 0;
};

}  // namespace longspan::bench
