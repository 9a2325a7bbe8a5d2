// One attention problem for the tests of the host backend: whole sequences of random numbers, cut
// into shards, attended rank by rank in one process, merged. All memory that is written starts as
// NaN, and so does every gap between rows.
#pragma once

#include <Eigen/Core>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/backend.hpp"
#include "launcher/elements.hpp"
#include "launcher/oracle.hpp"

namespace longspan::tests {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// Elements of any type; every byte 0xff, which is a NaN in all of them.
struct Array {
  DType dtype = DType::fp32;
  std::vector<std::byte> bytes;

  Array() = default;
  Array(DType type, std::int64_t n) : dtype(type), bytes(n * size_of(type), std::byte{0xff}) {}
  void* data() { return bytes.data(); }
  double operator[](std::int64_t i) const { return launcher::load(bytes.data(), dtype, i); }
  void set(std::int64_t i, float value) { launcher::store(bytes.data(), dtype, i, value); }
};

struct Shape {
  int heads = 4;
  int kv_heads = 2;
  int dim = 64;
  DType dtype = DType::fp32;
  std::vector<std::int32_t> query_len = {5};
  std::vector<std::int32_t> kv_len = {300};
  Mask mask = {};
  float softcap = 0;
};

struct Result {
  std::vector<float> out;  // [tokens, heads, dim]
  std::vector<float> lse;  // [tokens, heads]

  bool same_bits(const Result& other) const {
    const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
      return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * 4) == 0;
    };
    return same(out, other.out) && same(lse, other.lse);
  }
};

class Problem {
 public:
  static constexpr int kGap = 8;  // elements between rows, of NaN

  Problem(Shape s, std::uint32_t seed) : shape(std::move(s)) {
    query_start = starts(shape.query_len);
    key_start = starts(shape.kv_len);
    q = Array(shape.dtype, tokens() * q_stride());
    k = Array(shape.dtype, key_start.back() * kv_stride());
    v = k;
    std::mt19937 random(seed);
    fill(q, tokens(), q_stride(), shape.heads * shape.dim, random);
    fill(k, key_start.back(), kv_stride(), shape.kv_heads * shape.dim, random);
    fill(v, key_start.back(), kv_stride(), shape.kv_heads * shape.dim, random);
  }

  std::int64_t tokens() const { return query_start.back(); }
  std::int64_t q_stride() const { return std::int64_t{shape.heads} * shape.dim + kGap; }
  std::int64_t kv_stride() const { return std::int64_t{shape.kv_heads} * shape.dim + kGap; }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(shape.dim)); }
  int batch() const { return static_cast<int>(shape.kv_len.size()); }

  /// What a rank needs to attend; `shard.rank` and `shard.table` as given.
  kernels::AttendParams params(const Shard& shard, kernels::StateSlots state, int slot) {
    kernels::AttendParams p;
    p.dtype = shape.dtype;
    p.tokens = tokens();
    p.heads = shape.heads;
    p.kv_heads = shape.kv_heads;
    p.dim = shape.dim;
    p.q = {q.data(), q_stride(), shape.dim};
    p.batch = {batch(), query_start.data(), shape.kv_len.data(), nullptr};
    p.shard = shard;
    p.mask = shape.mask;
    p.score = {scale(), shape.softcap};
    p.state = state;
    p.slot = slot;
    return p;
  }

  /// The keys that a rank holds, packed sequence after sequence.
  struct Local {
    Array k, v;
    std::vector<std::int64_t> start;
  };
  Local local(const Shard& shard) const {
    Local l;
    std::int64_t count = 0;
    for (std::int64_t len : shape.kv_len) {
      l.start.push_back(count);
      count += shard.local_len(len);
    }
    l.k = Array(shape.dtype, count * kv_stride());
    l.v = l.k;
    const std::size_t row = kv_stride() * size_of(shape.dtype);
    for (int b = 0; b < batch(); ++b) {
      for (std::int64_t i = 0; i < shard.local_len(shape.kv_len[b]); ++i) {
        const std::int64_t at = key_start[b] + shard.position(i, shape.kv_len[b]);
        std::memcpy(l.k.bytes.data() + (l.start[b] + i) * row, k.bytes.data() + at * row, row);
        std::memcpy(l.v.bytes.data() + (l.start[b] + i) * row, v.bytes.data() + at * row, row);
      }
    }
    return l;
  }

  /// Attends `shards`, one a rank, and merges; fp32 results.
  Result run(const kernels::Backend& backend, const std::vector<Shard>& shards,
             const std::vector<float>* sinks = nullptr) {
    const int ranks = static_cast<int>(shards.size());
    const std::int64_t rows = tokens() * shape.heads;
    const std::int64_t slot_bytes = kernels::StateSlots::bytes(rows, shape.dim);
    std::vector<std::byte> memory(slot_bytes * ranks, std::byte{0xff});
    const kernels::StateSlots state{memory.data(), rows, shape.dim, ranks};
    for (int r = 0; r < ranks; ++r) {
      Local l = local(shards[r]);
      kernels::AttendParams p = params(shards[r], state, r);
      p.k = {l.k.data(), kv_stride(), shape.dim};
      p.v = {l.v.data(), kv_stride(), shape.dim};
      p.batch.key_start = l.start.data();
      backend.check(p);
      std::vector<std::byte> scratch(backend.attend_scratch(p) + 256, std::byte{0xff});
      p.scratch = scratch.data() + (256 - reinterpret_cast<std::uintptr_t>(scratch.data()) % 256);
      p.scratch_bytes = scratch.size() - 256;
      backend.attend(p, {});
    }
    Result result{std::vector<float>(rows * shape.dim, kNan), std::vector<float>(rows, kNan)};
    kernels::MergeParams m;
    m.states = state;
    m.interleaved = shards[0].layout == Layout::interleaved;
    m.heads = shape.heads;
    m.sinks = sinks ? sinks->data() : nullptr;
    m.tokens = tokens();
    m.out = {result.out.data(), std::int64_t{shape.heads} * shape.dim, shape.dim};
    m.lse = result.lse.data();
    m.lse_row_stride = shape.heads;
    m.lse_head_stride = 1;
    backend.merge(m, {});
    return result;
  }

  Result run(const kernels::Backend& backend) {
    return run(backend, {Shard::contiguous(shape.kv_len[0], 0, 1)});
  }

  /// The same rule on each of `ranks` ranks.
  static std::vector<Shard> on_all(const Shard& shard) {
    std::vector<Shard> shards;
    for (int r = 0; r < shard.ranks; ++r) shards.push_back(shard.on(r));
    return shards;
  }

  /// Distance from float64, |out - ref| / |ref| over everything, and the worst of lse; infinity
  /// where an empty row is not exactly 0 and -inf.
  struct Error {
    double out = 0, lse = 0;
  };
  Error error(const Result& result, const std::vector<float>* sinks = nullptr) const {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    double wrong = 0, norm = 0;
    Error e;
    for (int b = 0; b < batch(); ++b) {
      for (int h = 0; h < shape.heads; ++h) {
        const launcher::RowMajor keys = sequence(k, b, h), values = sequence(v, b, h);
        for (std::int64_t t = 0; t < shape.query_len[b]; ++t) {
          const std::int64_t token = query_start[b] + t, row = token * shape.heads + h;
          Eigen::VectorXd query(shape.dim);
          for (int c = 0; c < shape.dim; ++c) query[c] = q[token * q_stride() + h * shape.dim + c];
          const launcher::Exact exact = launcher::attend_exactly(
              query, keys, values,
              shape.mask.visible(shape.kv_len[b] - shape.query_len[b] + t, shape.kv_len[b]),
              scale(), shape.softcap, sinks ? std::optional<double>((*sinks)[h]) : std::nullopt);
          for (int c = 0; c < shape.dim; ++c) {
            const double out = result.out[row * shape.dim + c];
            wrong += (out - exact.out[c]) * (out - exact.out[c]);
            norm += exact.out[c] * exact.out[c];
          }
          const double lse = result.lse[row];
          if (std::isinf(exact.lse)) {
            if (lse != exact.lse) e.lse = kInfinity;
          } else {
            // Not std::max: a NaN must not pass.
            const double off = std::abs(lse - exact.lse);
            if (!(off <= e.lse)) e.lse = off;
          }
        }
      }
    }
    e.out = norm == 0 ? (wrong == 0 ? 0 : kInfinity) : std::sqrt(wrong / norm);
    return e;
  }

  Shape shape;
  std::vector<std::int32_t> query_start;  // [batch + 1]
  std::vector<std::int32_t> key_start;    // [batch + 1] of the whole sequences, packed
  Array q, k, v;

 private:
  static std::vector<std::int32_t> starts(const std::vector<std::int32_t>& lengths) {
    std::vector<std::int32_t> start = {0};
    for (std::int32_t n : lengths) start.push_back(start.back() + n);
    return start;
  }

  static void fill(Array& a, std::int64_t rows, std::int64_t stride, int n, std::mt19937& random) {
    std::normal_distribution<float> normal;
    for (std::int64_t r = 0; r < rows; ++r)
      for (int c = 0; c < n; ++c) a.set(r * stride + c, normal(random));
  }

  launcher::RowMajor sequence(const Array& a, int b, int head) const {
    const int kv_head = head / (shape.heads / shape.kv_heads);
    launcher::RowMajor m(shape.kv_len[b], shape.dim);
    for (std::int64_t i = 0; i < shape.kv_len[b]; ++i)
      for (int c = 0; c < shape.dim; ++c)
        m(i, c) = a[(key_start[b] + i) * kv_stride() + kv_head * shape.dim + c];
    return m;
  }
};

}  // namespace longspan::tests
