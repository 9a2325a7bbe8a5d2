// A random attention problem: whole sequences on the host, any rank's share of them, and the exact
// answer. Values are of order 1 and rounded to the dtype first, so the oracle and the kernels get
// the same numbers.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "launcher/judge/oracle.hpp"
#include "launcher/problem/elements.hpp"
#include "longspan/mask.hpp"
#include "longspan/shard.hpp"
#include "longspan/types.hpp"
#include "tests/support/random_elements.hpp"

namespace longspan::tests {

struct Shape {
  int heads = 4;
  int kv_heads = 2;
  int dim = 64;
  int value_dim = 0;  // 0: dim
  DType dtype = DType::fp32;
  std::vector<std::int32_t> q_lens{5};
  std::vector<std::int32_t> kv_lens{300};
  Mask mask = {};
  float softcap = 0;
  bool sinks = false;

  int of_value() const { return value_dim > 0 ? value_dim : dim; }
};

class Problem {
 public:
  Problem(const Shape& given, std::uint64_t seed) : shape(given) {
    tokens = std::accumulate(shape.q_lens.begin(), shape.q_lens.end(), std::int64_t{0});
    keys = std::accumulate(shape.kv_lens.begin(), shape.kv_lens.end(), std::int64_t{0});
    query_start.assign(1, 0);
    for (std::int32_t len : shape.q_lens) query_start.push_back(query_start.back() + len);
    q = draw(seed, 0, tokens * shape.heads * shape.dim);
    k = draw(seed, 1, keys * shape.kv_heads * shape.dim);
    v = draw(seed, 2, keys * shape.kv_heads * shape.of_value());
    if (shape.sinks) sinks = random_floats(shape.heads, seed, 3);
  }

  int batch() const { return static_cast<int>(shape.q_lens.size()); }

  /// The keys that the shard's rank holds, in its order.
  std::vector<std::byte> share_keys(const Shard& shard) const {
    return share(k, shard, shape.kv_lens, shape.kv_heads * shape.dim);
  }
  std::vector<std::byte> share_values(const Shard& shard) const {
    return share(v, shard, shape.kv_lens, shape.kv_heads * shape.of_value());
  }
  /// Likewise of q, for sharded queries.
  std::vector<std::byte> share_rows(const Shard& shard) const {
    return share(q, shard, shape.q_lens, shape.heads * shape.dim);
  }
  std::vector<std::byte> share_results(const std::vector<std::byte>& out,
                                       const Shard& shard) const {
    return share(out, shard, shape.q_lens, shape.heads * shape.of_value());
  }

  /// Exact answers, each of one (token, head), with the token counted over the batch. It keeps the
  /// sequences that it widened to float64, since widening takes longer than attending one row.
  class Oracle {
   public:
    explicit Oracle(const Problem& problem) : problem_(problem) {}

    launcher::Exact operator()(std::int64_t token, int head) {
      const Shape& shape = problem_.shape;
      int b = 0;
      while (token >= problem_.query_start[b + 1]) ++b;
      const std::int64_t kv_len = shape.kv_lens[b];
      const std::int64_t position = kv_len - shape.q_lens[b] + (token - problem_.query_start[b]);
      Eigen::VectorXd row(shape.dim);
      for (int d = 0; d < shape.dim; ++d)
        row[d] = launcher::load(problem_.q.data(), shape.dtype,
                                (token * shape.heads + head) * shape.dim + d);
      std::optional<double> sink;
      if (shape.sinks) sink = problem_.sinks[head];
      const Wide& wide = sequence(b, head / (shape.heads / shape.kv_heads));
      return launcher::attend_exactly(row, wide.keys, wide.values,
                                      launcher::seen_keys(shape.mask, position, kv_len),
                                      1.0 / std::sqrt(shape.dim), shape.softcap, sink);
    }

   private:
    struct Wide {
      launcher::RowMajor keys, values;  // [kv_len, dim], [kv_len, value_dim]
    };

    const Wide& sequence(int b, int kv_head) {
      const auto [found, is_new] = sequences_.try_emplace({b, kv_head});
      if (is_new) {
        const Shape& shape = problem_.shape;
        const std::int64_t first =
            std::accumulate(shape.kv_lens.begin(), shape.kv_lens.begin() + b, std::int64_t{0});
        found->second.keys =
            problem_.matrix(problem_.k, first, shape.kv_lens[b], kv_head, shape.dim);
        found->second.values =
            problem_.matrix(problem_.v, first, shape.kv_lens[b], kv_head, shape.of_value());
      }
      return found->second;
    }

    const Problem& problem_;
    std::map<std::pair<int, int>, Wide> sequences_;  // by sequence and kv head
  };

  /// Largest |out - exact| over one rank's rows: out [rows.size(), heads, value_dim], where row i
  /// is the token rows[i]. Also checks empty rows (zeros) and returns infinity on a NaN.
  double max_error(const std::vector<std::byte>& out, const std::vector<std::int64_t>& rows) const {
    Oracle exact(*this);
    double worst = 0;
    for (std::size_t i = 0; i < rows.size(); ++i)
      for (int h = 0; h < shape.heads; ++h) {
        const launcher::Exact e = exact(rows[i], h);
        for (int d = 0; d < shape.of_value(); ++d) {
          const std::int64_t row = static_cast<std::int64_t>(i) * shape.heads + h;
          const double value = launcher::load(out.data(), shape.dtype, row * shape.of_value() + d);
          const double error = std::fabs(value - e.out[d]);
          if (!(error <= worst)) worst = std::isnan(error) ? HUGE_VAL : error;
        }
      }
    return worst;
  }

  /// The error of one rounding to the dtype, and of products in it, at this size.
  double tolerance() const {
    return shape.dtype == DType::fp32 ? 5e-6 : shape.dtype == DType::fp16 ? 4e-3 : 3e-2;
  }

  Shape shape;
  std::int64_t tokens = 0;
  std::int64_t keys = 0;
  std::vector<std::int32_t> query_start;
  std::vector<std::byte> q, k, v;  // [tokens, heads, dim], [keys, kv_heads, dim or value_dim]
  std::vector<float> sinks;        // [heads], or none

 private:
  std::vector<std::byte> draw(std::uint64_t seed, std::uint32_t tensor, std::int64_t count) const {
    return random_elements(shape.dtype, count, seed, tensor);
  }

  std::vector<std::byte> share(const std::vector<std::byte>& whole, const Shard& shard,
                               const std::vector<std::int32_t>& lens, int elements) const {
    const std::size_t row = size_of(shape.dtype) * elements;
    std::vector<std::byte> part;
    std::int64_t first = 0;
    for (std::int32_t len : lens) {
      for (std::int64_t i = 0; i < shard.local_len(len); ++i) {
        const std::byte* from = whole.data() + (first + shard.position(i, len)) * row;
        part.insert(part.end(), from, from + row);
      }
      first += len;
    }
    return part;
  }

  launcher::RowMajor matrix(const std::vector<std::byte>& whole, std::int64_t first,
                            std::int64_t count, int kv_head, int dim) const {
    launcher::RowMajor m(count, dim);
    for (std::int64_t i = 0; i < count; ++i)
      for (int d = 0; d < dim; ++d)
        m(i, d) = launcher::load(whole.data(), shape.dtype,
                                 ((first + i) * shape.kv_heads + kv_head) * dim + d);
    return m;
  }
};

}  // namespace longspan::tests
