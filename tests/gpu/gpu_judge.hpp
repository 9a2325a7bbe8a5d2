// Compares a result of gpu_run.hpp with float64.
#pragma once

#include <cstring>
#include <limits>
#include <span>

#include "launcher/judge/oracle.hpp"
#include "tests/gpu/gpu_run.hpp"
#include "tests/support/rounding.hpp"

namespace longspan::test {

/// The errors of an fp32 result against float64, and those of a plain computation: every step in
/// fp32, one key after the other.
struct Judgement {
  double worst_lse = 0;   // max |lse - exact| / (1 + |exact|); infinities must agree
  double norm = 0;        // |out - exact| / |exact|
  double norm_plain = 0;  // |plain - exact| / |exact|
};

/// One row in fp32. bias, kept: of these keys, or nothing.
inline Eigen::VectorXd attend_plainly(const Case& c, const Eigen::VectorXd& q,
                                      const Eigen::Ref<const launcher::RowMajor>& keys,
                                      const Eigen::Ref<const launcher::RowMajor>& values,
                                      std::optional<double> sink, std::span<const double> bias,
                                      std::span<const double> kept) {
  std::vector<float> scores;
  float top = sink ? static_cast<float>(*sink) : -infinity();
  for (Eigen::Index i = 0; i < keys.rows(); ++i) {
    float s = 0;
    for (int d = 0; d < c.dim; ++d) s += static_cast<float>(q[d]) * static_cast<float>(keys(i, d));
    s *= c.scale_used();
    if (c.softcap != 0) s = c.softcap * std::tanh(s / c.softcap);
    if (!bias.empty()) s += static_cast<float>(bias[static_cast<std::size_t>(i)]);
    scores.push_back(s);
    top = std::max(top, s);
  }
  float sum = sink ? std::exp(static_cast<float>(*sink) - top) : 0.0f;
  Eigen::VectorXf out = Eigen::VectorXf::Zero(c.of_value());
  for (Eigen::Index i = 0; i < keys.rows(); ++i) {
    const float weight = std::exp(scores[static_cast<std::size_t>(i)] - top);
    sum += weight;
    const float z = kept.empty() ? 1.0f : static_cast<float>(kept[static_cast<std::size_t>(i)]);
    out += z * weight * values.row(i).transpose().cast<float>();
  }
  return (out / sum).cast<double>();
}

/// One head [kv_len, dim] of a sequence's keys or values.
inline launcher::RowMajor matrix_of(const Case& c, const std::vector<std::byte>& rows, int dim,
                                    std::int64_t kv_len, int kv_head) {
  launcher::RowMajor matrix(kv_len, dim);
  for (std::int64_t i = 0; i < kv_len; ++i)
    for (int d = 0; d < dim; ++d)
      matrix(i, d) = launcher::load(rows.data(), c.dtype, (i * c.kv_heads + kv_head) * dim + d);
  return matrix;
}

/// Compares the rows of every `stride`-th token.
inline Judgement judge(const Case& c, const Data& data, const Result& result, int stride = 1) {
  Judgement verdict;
  const int group = c.heads / c.kv_heads;
  double difference = 0, difference_plain = 0, size = 0;
  std::int64_t first_row = 0;
  for (int b = 0; b < c.batch(); ++b) {
    const std::int64_t q_len = c.q_lens[static_cast<std::size_t>(b)];
    const std::int64_t kv_len = c.kv_lens[static_cast<std::size_t>(b)];
    for (int kv_head = 0; kv_head < c.kv_heads; ++kv_head) {
      const launcher::RowMajor keys =
          matrix_of(c, data.k[static_cast<std::size_t>(b)], c.dim, kv_len, kv_head);
      const launcher::RowMajor values =
          matrix_of(c, data.v[static_cast<std::size_t>(b)], c.of_value(), kv_len, kv_head);
      for (std::int64_t t = 0; t < q_len; t += stride)
        for (int g = 0; g < group; ++g) {
          const int head = kv_head * group + g;
          const std::int64_t row = (first_row + t) * c.heads + head;
          Eigen::VectorXd q(c.dim);
          for (int d = 0; d < c.dim; ++d)
            q[d] = launcher::load(data.q.data(), c.dtype, row * c.dim + d);
          const Interval seen = c.visible(static_cast<std::size_t>(b), t);
          const std::vector<double> bias = data.bias(c, static_cast<std::size_t>(b), t, head);
          const std::vector<double> kept = Data::kept(c, static_cast<std::size_t>(b), t, head);
          std::optional<double> sink;
          if (c.sinks) sink = data.sinks[static_cast<std::size_t>(head)];
          const launcher::Exact exact = launcher::attend_exactly(
              q, keys, values, seen, c.scale_used(), c.softcap, sink, bias, kept);
          Eigen::VectorXd plain = Eigen::VectorXd::Zero(c.of_value());
          if (!seen.empty()) {
            const auto k = keys.middleRows(seen.begin, seen.end - seen.begin);
            const auto v = values.middleRows(seen.begin, seen.end - seen.begin);
            const std::span<const double> own =
                bias.empty() ? std::span<const double>() : std::span(bias).subspan(seen.begin);
            plain = attend_plainly(
                c, q, k, v, sink, own,
                kept.empty() ? std::span<const double>() : std::span(kept).subspan(seen.begin));
          }
          for (int d = 0; d < c.of_value(); ++d) {
            const double got = launcher::load(result.out.data(), c.dtype, row * c.of_value() + d);
            difference += (got - exact.out[d]) * (got - exact.out[d]);
            difference_plain += (plain[d] - exact.out[d]) * (plain[d] - exact.out[d]);
            size += exact.out[d] * exact.out[d];
          }
          const double lse = result.lse[static_cast<std::size_t>(row)];
          const double lse_error =
              lse == exact.lse ? 0.0 : std::abs(lse - exact.lse) / (1 + std::abs(exact.lse));
          verdict.worst_lse = lse_error <= verdict.worst_lse ? verdict.worst_lse : lse_error;
        }
    }
    first_row += q_len;
  }
  verdict.norm = std::sqrt(difference / (size > 0 ? size : 1));
  verdict.norm_plain = std::sqrt(difference_plain / (size > 0 ? size : 1));
  return verdict;
}

/// A bias is rounded when it is made, when it is added and when the maximum is subtracted: relative
/// to its size, which may be far above that of a score.
constexpr double kOfBias = 4 * 0x1p-24;

/// Every element within the bound of two roundings: of the weights before the product with the
/// values, and of the output. Every lse within lse_bound. Unlike a comparison of worst errors this
/// never fails by chance, and it is tight: a key too many or too few shows.
inline void expect_within_rounding(const Case& c, const Data& data, const Result& result,
                                   int stride = 1) {
  const double unit = c.dtype == DType::bf16 ? 0x1p-8 : 0x1p-11;        // of one rounding
  const double smallest = c.dtype == DType::bf16 ? 0x1p-134 : 0x1p-25;  // half the least number
  constexpr double kSingle = 3e-6;  // of fp32 sums and of the fast exponential, relative
  const tests::TensorCore core = tests::TensorCore::of(compute_capability());
  SCOPED_TRACE(::testing::Message() << c);
  std::int64_t first_row = 0;
  for (std::size_t b = 0; b < c.q_lens.size(); ++b) {
    const std::int64_t q_len = c.q_lens[b], kv_len = c.kv_lens[b];
    for (int kv_head = 0; kv_head < c.kv_heads; ++kv_head) {
      const launcher::RowMajor keys = matrix_of(c, data.k[b], c.dim, kv_len, kv_head);
      const launcher::RowMajor values = matrix_of(c, data.v[b], c.of_value(), kv_len, kv_head);
      const int group = c.heads / c.kv_heads;
      for (std::int64_t t = 0; t < q_len; t += stride)
        for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
          const std::int64_t row = (first_row + t) * c.heads + head;
          Eigen::VectorXd q(c.dim);
          for (int d = 0; d < c.dim; ++d)
            q[d] = launcher::load(data.q.data(), c.dtype, row * c.dim + d);
          const Interval seen = c.visible(b, t);
          const std::vector<double> bias = data.bias(c, b, t, head);
          const std::vector<double> kept = Data::kept(c, b, t, head);
          std::optional<double> sink;
          if (c.sinks) sink = data.sinks[static_cast<std::size_t>(head)];
          const launcher::Exact exact = launcher::attend_exactly(
              q, keys, values, seen, c.scale_used(), c.softcap, sink, bias, kept);
          const double lse = result.lse[static_cast<std::size_t>(row)];
          double lse_off = 4 * 0x1p-24 * std::abs(exact.lse);  // a sink alone, to base 2 and back
          Eigen::VectorXd moved = Eigen::VectorXd::Zero(c.of_value());  // by rounding weights
          double single = kSingle;  // the error of fp32 in a weight
          if (!seen.empty()) {
            const auto k = keys.middleRows(seen.begin, seen.end - seen.begin);
            const auto v = values.middleRows(seen.begin, seen.end - seen.begin);
            const std::span<const double> own =
                bias.empty() ? std::span<const double>() : std::span(bias).subspan(seen.begin);
            const double lift =
                c.alibi == Alibi::context
                    ? data.slopes[static_cast<std::size_t>(head)] * static_cast<double>(t)
                    : 0.0;
            lse_off = tests::lse_bound(core, q, k, c.scale_used(), c.softcap, own, lift, exact.lse);
            Eigen::ArrayXd s = (k * q).array() * c.scale_used();
            single += kSingle * s.abs().maxCoeff();
            if (c.softcap != 0) s = c.softcap * (s / c.softcap).tanh();
            if (!bias.empty()) {
              const Eigen::Map<const Eigen::ArrayXd> added(own.data(), s.size());
              single += kOfBias * added.abs().maxCoeff();
              s += added;
            }
            Eigen::VectorXd error = (s - exact.lse).exp() * (unit + single) + smallest;
            for (Eigen::Index j = 0; j < error.size() && !kept.empty(); ++j)
              error[j] *= kept[static_cast<std::size_t>(seen.begin + j)];
            moved = v.cwiseAbs().transpose() * error;
          }
          if (std::isinf(exact.lse))
            EXPECT_EQ(lse, exact.lse);
          else
            EXPECT_NEAR(lse, exact.lse, lse_off) << "row " << row;
          for (int d = 0; d < c.of_value(); ++d) {
            const double got = launcher::load(result.out.data(), c.dtype, row * c.of_value() + d);
            const double bound = moved[d] + (std::abs(exact.out[d]) + moved[d]) * unit +
                                 single * std::abs(exact.out[d]) + smallest;
            EXPECT_LE(std::abs(got - exact.out[d]), bound) << "row " << row << " column " << d;
          }
        }
    }
    first_row += q_len;
  }
}

/// 16 bits: every element. fp32: by norm at most twice the error of a plain computation, but 2e-6
/// is good enough. With scores of order 10 fp32 itself is worse.
inline void expect_exact(const Case& c, const Data& data, const Result& result, int stride = 1) {
  if (c.dtype != DType::fp32) return expect_within_rounding(c, data, result, stride);
  const Judgement verdict = judge(c, data, result, stride);
  SCOPED_TRACE(::testing::Message() << c);
  EXPECT_LE(verdict.norm, std::max(2e-6, 2 * verdict.norm_plain));
  EXPECT_LE(verdict.worst_lse, 2e-6);
}

inline void expect_same_bits(const Result& a, const Result& b) {
  ASSERT_EQ(a.out.size(), b.out.size());
  EXPECT_EQ(std::memcmp(a.out.data(), b.out.data(), a.out.size()), 0) << "outputs differ";
  EXPECT_EQ(std::memcmp(a.lse.data(), b.lse.data(), a.lse.size() * sizeof(float)), 0)
      << "lse differ";
}

}  // namespace longspan::test
