// Gradients for the tests of the host kernels: a HostProblem with gradients of its results, taken
// backward shard by shard in one process, and float64 as judge.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>
#include <type_traits>
#include <vector>

#include "kernels/gradient_params.hpp"
#include "launcher/judge/gradients.hpp"
#include "launcher/problem/elements.hpp"
#include "tests/support/host_problem.hpp"

namespace longspan::tests {

/// Gradients of whole tensors, in one type.
template <class Real>
struct GradientResult {
  std::vector<Real> dq;  // [tokens, heads, dim]
  std::vector<Real> dk;  // [keys, kv_heads, dim]
  std::vector<Real> dv;
  std::vector<Real> dsinks;                 // [heads], if there are sinks
  std::vector<Real> dslopes;                // [heads] or [batch, heads], if there are slopes
  std::vector<Real> dqq;                    // [width, width], if there is a qq_bias
  std::vector<Real> slope_terms, qq_terms;  // of plain(): the sums of their absolute terms

  bool operator==(const GradientResult&) const = default;
};

class HostGradients {
 public:
  HostGradients(HostShape shape, std::uint32_t seed, bool with_dlse = true, DType dout_type = fp32)
      : problem(std::move(shape), seed), dout_dtype(dout_type) {
    const HostShape& s = problem.shape;
    const std::int64_t rows = problem.tokens() * s.heads;
    dout = random_floats(rows * s.dim, seed, 7);
    if (dout_type != fp32)
      for (float& x : dout) x = launcher::rounded(dout_type, x);
    if (with_dlse) dlse = random_floats(rows, seed, 8);
  }

  /// Backward of a run whose keys lie on `shards` and whose rows are all here; the parts of dq are
  /// added in the order of the shards.
  GradientResult<float> run(const kernels::Backend& backend, const std::vector<Shard>& shards,
                            bool invariant = false) {
    const HostShape& s = problem.shape;
    const Result forward = problem.run(backend, shards, sinks.empty() ? nullptr : &sinks);
    std::vector<kernels::RowTerm> terms(problem.tokens() * s.heads);
    const std::int64_t row = std::int64_t{s.heads} * s.dim;
    backend.row_terms(
        {.tokens = problem.tokens(),
         .heads = s.heads,
         .value_dim = s.dim,
         .out = kernels::Rows{const_cast<float*>(forward.out.data()), row, s.dim},
         .dout = kernels::Rows{dout.data(), row, s.dim},
         .lse = kernels::LseView{const_cast<float*>(forward.lse.data()), s.heads, 1},
         .dlse = dlse.empty() ? kernels::TokenLse() : kernels::LseView{dlse.data(), s.heads, 1},
         .terms = terms.data()},
        {});

    GradientResult<float> all;
    all.dsinks.assign(sinks.size(), kNan);
    if (!sinks.empty())
      backend.sink_gradients({.tokens = problem.tokens(),
                              .heads = s.heads,
                              .sinks = sinks.data(),
                              .terms = terms.data(),
                              .to = all.dsinks.data()},
                             {});
    all.dk.assign(problem.key_start.back() * s.kv_heads * s.dim, kNan);
    all.dv = all.dk;
    const int columns = kernels::GradientSums::padded(s.dim), group = s.heads / s.kv_heads;
    const std::int64_t heads = s.heads + 3, width = problem.qq_width() + 5;  // with gaps
    std::vector<float> dslopes(slope_rows() * heads, 0.0f), dqq(width * width, 0.0f);
    std::vector<float> dq(problem.tokens() * s.heads * columns, kNan);
    bool first = true;
    for (const Shard& shard : shards) {
      kernels::GradientParams p;
      static_cast<kernels::AttendParams&>(p) = problem.params(shard, {}, 0);
      Local local = problem.local(shard);
      local.give(p);
      p.invariant = invariant;
      Array given(dout_dtype, std::ssize(dout));
      for (std::int64_t i = 0; i < std::ssize(dout); ++i) given.set(i, dout[i]);
      p.dout = kernels::Rows{given.data(), row, s.dim};
      p.dout_dtype = dout_dtype;
      p.terms = terms.data();
      const std::int64_t keys = local_keys(shard);
      std::vector<float> dk(std::max<std::int64_t>(1, keys) * s.kv_heads * columns, kNan);
      std::vector<float> dv = dk;
      p.dq = {dq.data(), problem.tokens() * group, s.dim};
      p.dk = {dk.data(), keys, s.dim};
      p.dv = {dv.data(), keys, s.dim};
      if (s.alibi) p.biases.slopes = dslopes.data();
      if (s.slopes_of_sequences) p.biases.slope_stride = heads;
      if (s.qq) p.biases.qq = dqq.data();
      p.biases.qq_stride = width;
      p.resume_rows = !first;
      first = false;
      std::vector<std::byte> scratch(backend.gradient_scratch(p) + 256, std::byte{0xff});
      p.scratch = scratch.data() + (256 - reinterpret_cast<std::uintptr_t>(scratch.data()) % 256);
      p.scratch_bytes = scratch.size() - 256;
      backend.attend_gradients(p, {});
      for (int b = 0; b < problem.batch(); ++b) {
        const Shard of_b = shard.for_sequence(b);
        for (std::int64_t i = 0; i < of_b.local_len(s.kv_len[b]); ++i) {
          const std::int64_t at = problem.key_start[b] + of_b.position(i, s.kv_len[b]);
          for (int h = 0; h < s.kv_heads; ++h) {
            const std::int64_t to = (at * s.kv_heads + h) * s.dim;
            std::copy_n(p.dk.at(h, local.start[b] + i), s.dim, all.dk.begin() + to);
            std::copy_n(p.dv.at(h, local.start[b] + i), s.dim, all.dv.begin() + to);
          }
        }
      }
    }
    if (s.alibi) all.dslopes = without_gaps(dslopes, slope_rows(), heads, s.heads);
    if (s.qq) all.dqq = without_gaps(dqq, problem.qq_width(), width, problem.qq_width());
    all.dq.assign(problem.tokens() * row, kNan);
    backend.store_gradients({.sums = {dq.data(), problem.tokens() * group, s.dim},
                             .count = problem.tokens() * group,
                             .kv_heads = s.kv_heads,
                             .group = group,
                             .to = kernels::Rows{all.dq.data(), row, s.dim}},
                            {});
    return all;
  }

  /// The same in `Real`, materialised: float64 is the judge. fp32 is the yardstick, and starts from
  /// out and lse that were given to backward.
  template <class Real>
  GradientResult<Real> plain(const Result& given = {}) const {
    const HostShape& s = problem.shape;
    GradientResult<Real> all;
    all.dq.assign(problem.tokens() * s.heads * s.dim, 0);
    all.dk.assign(problem.key_start.back() * s.kv_heads * s.dim, 0);
    all.dv = all.dk;
    all.dsinks.assign(sinks.size(), 0);
    if (s.alibi) all.dslopes.assign(slope_rows() * s.heads, 0);
    if (s.qq) all.dqq.assign(problem.qq_width() * problem.qq_width(), 0);
    all.slope_terms = all.dslopes;
    all.qq_terms = all.dqq;
    for (int b = 0; b < problem.batch(); ++b) {
      for (int h = 0; h < s.heads; ++h) {
        const int kv_head = h / (s.heads / s.kv_heads);
        const launcher::MatrixOf<Real> keys = problem.sequence(problem.k, b, h).cast<Real>();
        const launcher::MatrixOf<Real> values = problem.sequence(problem.v, b, h).cast<Real>();
        launcher::GradientsOf<Real> sums{launcher::MatrixOf<Real>::Zero(s.kv_len[b], s.dim),
                                         launcher::MatrixOf<Real>::Zero(s.kv_len[b], s.dim)};
        for (std::int64_t t = 0; t < s.query_len[b]; ++t) {
          const std::int64_t row = (problem.query_start[b] + t) * s.heads + h;
          launcher::VectorOf<Real> q(s.dim), of_out(s.dim);
          for (int c = 0; c < s.dim; ++c) {
            q[c] = problem.q[(problem.query_start[b] + t) * problem.q_stride() + h * s.dim + c];
            of_out[c] = dout[row * s.dim + c];
          }
          const std::int64_t position = problem.context(b) + t;
          launcher::rotate(q, s.rope, problem.angles(position), false);
          if (s.rope.dim > 0 && std::is_same_v<Real, float>)  // as the user's kernel would store it
            for (int c = 0; c < s.dim; ++c)
              q[c] = launcher::rounded(s.dtype, static_cast<float>(q[c]));
          launcher::RowResult<Real> result{launcher::VectorOf<Real>(s.dim), 0};
          if (!given.out.empty()) {
            result.lse = static_cast<Real>(given.lse[row]);
            for (int c = 0; c < s.dim; ++c)
              result.out[c] = launcher::rounded(out_dtype, given.out[row * s.dim + c]);
          }
          const std::vector<double> wide = problem.biases(b, h, t);
          const std::vector<Real> bias(wide.begin(), wide.end());
          launcher::RowGradients<Real> own = launcher::add_gradients<Real>(
              q, keys, values, problem.visible(b, t), static_cast<Real>(problem.scale()),
              static_cast<Real>(s.softcap),
              sinks.empty() ? std::nullopt : std::optional<Real>(static_cast<Real>(sinks[h])), bias,
              of_out, dlse.empty() ? Real{0} : static_cast<Real>(dlse[row]), sums,
              given.out.empty() ? nullptr : &result);
          launcher::rotate(own.dq, s.rope, problem.angles(position), true);
          for (int c = 0; c < s.dim; ++c) all.dq[row * s.dim + c] = own.dq[c];
          if (!sinks.empty()) all.dsinks[h] += own.dsink;
          add_biases(b, h, t, own.dbias, all);
        }
        for (std::int64_t j = 0; j < s.kv_len[b] && dk_before_rope; ++j) {
          launcher::VectorOf<Real> dk = sums.dk.row(j);
          launcher::rotate(dk, s.rope, problem.angles(j), true);
          sums.dk.row(j) = dk;
        }
        for (std::int64_t j = 0; j < s.kv_len[b]; ++j) {
          const std::int64_t at = ((problem.key_start[b] + j) * s.kv_heads + kv_head) * s.dim;
          for (int c = 0; c < s.dim; ++c) {
            all.dk[at + c] += sums.dk(j, c);
            all.dv[at + c] += sums.dv(j, c);
          }
        }
      }
    }
    return all;
  }

  /// Adds the gradients of a row's biases to those of what they are made of.
  template <class Real, class Biases>
  void add_biases(int b, int h, std::int64_t t, const Biases& dbias,
                  GradientResult<Real>& all) const {
    const HostShape& s = problem.shape;
    const std::int64_t first = problem.context(b), width = problem.qq_width();
    for (std::int64_t j = 0; j < s.kv_len[b]; ++j) {
      if (s.alibi) {
        const std::int64_t at = (s.slopes_of_sequences ? b * s.heads : 0) + h;
        const Real term =
            dbias[j] * static_cast<Real>(launcher::alibi_term(*s.alibi, first + t, j, first));
        all.dslopes[at] += term;
        all.slope_terms[at] += std::abs(term);
      }
      if (s.qq && j >= first && j - first < width) {
        all.dqq[t * width + j - first] += dbias[j];
        all.qq_terms[t * width + j - first] += std::abs(dbias[j]);
      }
    }
  }

  HostProblem problem;
  DType out_dtype = fp32;  // of the out that backward is given
  DType dout_dtype;
  bool dk_before_rope = false;
  std::vector<float> dout;   // [tokens, heads, dim]
  std::vector<float> dlse;   // [tokens, heads]; empty: none
  std::vector<float> sinks;  // [heads]; empty: none

 private:
  std::int64_t slope_rows() const {
    return problem.shape.slopes_of_sequences ? problem.batch() : 1;
  }
  static std::vector<float> without_gaps(const std::vector<float>& from, std::int64_t rows,
                                         std::int64_t stride, std::int64_t columns) {
    std::vector<float> to;
    for (std::int64_t r = 0; r < rows; ++r)
      to.insert(to.end(), from.begin() + r * stride, from.begin() + r * stride + columns);
    return to;
  }
  std::int64_t local_keys(const Shard& shard) const {
    std::int64_t keys = 0;
    for (int b = 0; b < problem.batch(); ++b)
      keys += shard.for_sequence(b).local_len(problem.shape.kv_len[b]);
    return keys;
  }
};

/// The largest errors that gradients may have: 1.5 times those of plain fp32, and 2 ulp of the
/// largest gradient. The few gradients of sinks and biases are sums whose terms cancel, so it is
/// 2 ulp of the largest sum of absolute terms.
struct GradientBounds {
  double dq, dk, dv, dsinks, dslopes, dqq;

  GradientBounds(const HostGradients& problem, const Result& given) {
    const GradientResult<double> exact = problem.plain<double>();
    const GradientResult<float> plain = problem.plain<float>(given);
    const auto bound = [](const std::vector<double>& e, const std::vector<float>& p) {
      double error = 0, largest = 0;
      for (std::size_t i = 0; i < e.size(); ++i) {
        error = std::max(error, std::abs(p[i] - e[i]));
        largest = std::max(largest, std::abs(e[i]));
      }
      return 1.5 * error + 2 * 0x1p-23 * largest;
    };
    dq = bound(exact.dq, plain.dq);
    dk = bound(exact.dk, plain.dk);
    dv = bound(exact.dv, plain.dv);
    const auto ulps_of = [](const std::vector<double>& terms) {
      return terms.empty() ? 0 : 2 * 0x1p-23 * *std::max_element(terms.begin(), terms.end());
    };
    dsinks = bound(exact.dsinks, plain.dsinks) + 2 * 0x1p-23 * largest_sink_terms(problem, given);
    dslopes = bound(exact.dslopes, plain.dslopes) + ulps_of(exact.slope_terms);
    dqq = bound(exact.dqq, plain.dqq) + ulps_of(exact.qq_terms);
  }

 private:
  /// The largest sum over rows of exp(sink - lse) (sum |dout out| + |dlse|) of a head.
  static double largest_sink_terms(const HostGradients& problem, const Result& given) {
    const HostShape& s = problem.problem.shape;
    double largest = 0;
    for (std::size_t h = 0; h < problem.sinks.size(); ++h) {
      double sum = 0;
      for (std::size_t row = h; row < given.lse.size(); row += problem.sinks.size()) {
        double terms = problem.dlse.empty() ? 0 : std::abs(problem.dlse[row]);
        for (std::size_t c = row * s.dim; c < (row + 1) * s.dim; ++c)
          terms += std::abs(problem.dout[c] * given.out[c]);
        sum += std::exp(problem.sinks[h] - given.lse[row]) * terms;
      }
      largest = std::max(largest, sum);
    }
    return largest;
  }
};

inline ::testing::AssertionResult is_close(const GradientResult<float>& found,
                                           const GradientResult<double>& exact,
                                           const GradientBounds& bounds) {
  const auto check = [](const char* name, const std::vector<float>& a, const std::vector<double>& e,
                        double bound) {
    if (a.size() != e.size()) return ::testing::AssertionFailure() << name << " has another size";
    double error = 0;
    for (std::size_t i = 0; i < e.size(); ++i) {
      const double off = std::abs(a[i] - e[i]);
      if (!(off <= error)) error = off;  // keeps a NaN
    }
    if (error <= bound) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << name << ": error " << error << ", bound " << bound;
  };
  if (auto r = check("dq", found.dq, exact.dq, bounds.dq); !r) return r;
  if (auto r = check("dk", found.dk, exact.dk, bounds.dk); !r) return r;
  if (auto r = check("dv", found.dv, exact.dv, bounds.dv); !r) return r;
  if (auto r = check("dsinks", found.dsinks, exact.dsinks, bounds.dsinks); !r) return r;
  if (auto r = check("dslopes", found.dslopes, exact.dslopes, bounds.dslopes); !r) return r;
  return check("dqq", found.dqq, exact.dqq, bounds.dqq);
}

}  // namespace longspan::tests
