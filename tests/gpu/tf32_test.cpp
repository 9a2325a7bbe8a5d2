// Products of tf32 for fp32 tensors, through the layer, against float64: the option stays within
// the bound of its roundings, has an effect, and without it nothing changes.
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "tests/gpu/serving_ranks.hpp"

namespace longspan::tests {
namespace {

ServingResult run_option(const ServingProblem& problem, bool tf32, bool invariant = false) {
  const ServingArrays arrays(Device::cuda, problem, Shard::contiguous(0, 0, 1));
  Options options = options_for(problem);
  options.dtypes.tf32 = tf32;
  options.invariant = invariant;
  Attention layer(self(Device::cuda), options);
  layer.run(arrays.args());
  layer.wait();
  return arrays.result();
}

/// tf32 has 10 bits of mantissa, so rounding to nearest moves a factor by at most u = 2^-11 of
/// itself and a product by 2 u + u^2, little more than 2^-10. fp32 sums add at most 2^-16 of the
/// sum of magnitudes. With e the sum of both:
///
///     score    |ds_j| <= e |scale| sum_d |q_d k_jd|         (softcap's slope is at most 1)
///     weight   times e^ds_j, so by at most m_j = expm1(max |ds_j|) of itself
///     out      sum_j w_j (e^ds_j - 1) (v_j - out) / sum_j w_j e^ds_j   from the scores, since
///              sum_j w_j (v_j - out) = 0, a sink being a key with value 0 that does not move;
///              and e sum_j w'_j |v_j| from the products with v
///     lse      within -log(1 - sum_j w_j m_j)
///
/// where w sums to 1. A bias is outside of these products; such cases take the norm alone.
Distance expect_within_tf32(const ServingProblem& problem, const ServingResult& found,
                            std::int64_t sampled) {
  const Serving& s = problem.shape;
  constexpr double kUnit = 0x1p-11, kProduct = 2 * kUnit + kUnit * kUnit + 0x1p-16;
  const bool bounded = !s.alibi && !s.qq_bias;
  Distance distance;
  for_sampled_rows(problem, sampled, [&](const SampledRow& row) {
    const launcher::Exact& exact = row.exact;
    const double lse = found.lse[row.at];
    if (std::isinf(exact.lse)) {
      EXPECT_EQ(lse, exact.lse);
      return;
    }
    Eigen::VectorXd moved = Eigen::VectorXd::Zero(s.dim);  // times 1 - moved_weight
    double moved_weight = 0;
    for (std::int64_t j = row.seen.begin; bounded && j < row.seen.end; ++j) {
      double score = s.scale_used() * row.keys.row(j).dot(row.q);
      if (s.softcap != 0) score = s.softcap * std::tanh(score / s.softcap);
      const double weight = std::exp(score - exact.lse);
      const double m =
          std::expm1(kProduct * s.scale_used() * row.keys.row(j).cwiseAbs().dot(row.q.cwiseAbs()));
      moved_weight += weight * m;
      const Eigen::VectorXd v = row.values.row(j).transpose();
      moved += weight * m * (v - exact.out).cwiseAbs() + kProduct * weight * (1 + m) * v.cwiseAbs();
    }
    if (bounded) {
      EXPECT_LE(std::abs(lse - exact.lse),
                -std::log1p(-moved_weight) + 0x1p-20 * (1 + std::abs(exact.lse)))
          << "lse of row " << row.at;
    }
    for (int d = 0; d < s.dim; ++d) {
      const double out = launcher::load(found.out.data(), s.of_out(), row.at * s.dim + d);
      distance.add(out, exact.out[d]);
      if (bounded) {
        EXPECT_LE(std::abs(out - exact.out[d]), moved[d] / (1 - moved_weight) + 1e-9)
            << "row " << row.at << " dim " << d << ": " << out << ", exactly " << exact.out[d];
      }
    }
  });
  return distance;
}

/// The roundings of many products are independent, so the whole is nearer than the bound of each
/// element, which could hide a wrong key. A rounding's standard deviation is under 2^-11 / sqrt(3)
/// of a factor, a weight's that of its score (of order 1) and of its product with v, in all some
/// 2^-11. Twice that is allowed, while one key of a thousand too many is 2^-5. The lower end is
/// beyond the error of fp32 products.
void check_tf32(const Serving& s, std::int64_t sampled = 6, int segments = 0) {
  if (is_left_out(4 * work_of(s))) return;
  const std::uint64_t seed = fresh_seed();
  SCOPED_TRACE(describe(s) + ", segments " + std::to_string(segments) + ", seed " +
               std::to_string(seed));
  const ServingProblem problem(s, seed);
  const Distance distance =
      expect_within_tf32(problem,
                         segments > 0 ? run_segmented(ServingOps(Device::cuda), Device::cuda,
                                                      problem, {.segments = segments, .tf32 = true})
                                      : run_option(problem, true),
                         sampled);
  EXPECT_GT(distance.compared, 0);
  EXPECT_LT(distance.norm(), 0x1p-10);
  EXPECT_GT(distance.norm(), 0x1p-16);
}

/// A rank's share of the query rows.
TEST(Tf32, SharesOfTheRows) {
  LONGSPAN_NEEDS_GPU();
  for (const QueryCut& rows : {QueryCut{Layout::zigzag, 2}, QueryCut{Layout::striped, 3},
                               QueryCut{Layout::interleaved, 2, 16}})
    for (const std::optional<Alibi> alibi : {std::optional<Alibi>{}, std::optional{Alibi::query}}) {
      Serving s{.heads = 4,
                .kv_heads = 2,
                .dim = 64,
                .dtype = DType::fp32,
                .q_lens = {90, 6},
                .kv_lens = {300, 200}};
      s.alibi = alibi;
      if (is_left_out(4 * work_of(s))) continue;
      const std::uint64_t seed = fresh_seed();
      const Dealt dealt{.tf32 = true, .queries = rows};
      SCOPED_TRACE(trace(s, dealt, seed));
      const ServingProblem problem(s, seed);
      const Distance distance = expect_within_tf32(problem, run_dealt(problem, dealt), 12);
      EXPECT_LT(distance.norm(), 0x1p-10);
      EXPECT_GT(distance.norm(), 0x1p-16);
    }
}

/// Short and long queries, one key, a row of no key; one sequence alone and many.
const std::vector<std::vector<std::int32_t>> kQueries[] = {
    {{1}, {700}}, {{150}, {700}}, {{1, 5, 33, 16, 1}, {300, 170, 400, 129, 1}}};

TEST(Tf32, DimsRowsAndPages) {
  LONGSPAN_NEEDS_GPU();
  for (const int dim : {16, 24, 64, 72, 128, 136, 256})
    for (const int page : {0, 1, 16, 48})
      for (const auto& lengths : kQueries)
        for (const bool causal : {false, true}) {
          Serving s{.dim = dim, .q_lens = lengths[0], .kv_lens = lengths[1]};
          s.mask.causal = causal;
          s.page = page;
          check_tf32(s);
        }
}

TEST(Tf32, Groups) {
  LONGSPAN_NEEDS_GPU();
  for (const int group : {1, 3, 8, 40})
    for (const auto& lengths : kQueries) {
      Serving s{.heads = 2 * group, .q_lens = lengths[0], .kv_lens = lengths[1]};
      s.mask.window = 100;
      check_tf32(s, 4);
    }
}

/// Scales of fp8 keys, the packing of pages, softcap, sinks, biases.
TEST(Tf32, Features) {
  LONGSPAN_NEEDS_GPU();
  for (const DType kv : {DType::fp32, DType::e4m3, DType::e5m2})
    for (const bool x_packed : {false, true})
      for (const bool bias : {false, true})
        for (const int dim : {64, 96, 256}) {
          Serving s{.dim = dim, .kv_dtype = kv};
          s.x_packed = x_packed;
          s.per_head_scales = s.sinks = true;
          s.softcap = 20;
          if (bias) s.alibi = Alibi::query;
          s.qq_bias = bias;
          check_tf32(s);
        }
}

/// A state for each part of the keys.
TEST(Tf32, SegmentsHandedOut) {
  LONGSPAN_NEEDS_GPU();
  for (const int dim : {64, 128, 256})
    for (const int segments : {1, 5, 16}) check_tf32({.dim = dim, .sinks = true}, 6, segments);
}

/// Splits of the keys, and more work tiles than blocks.
TEST(Tf32, LongKeysAndManyRows) {
  LONGSPAN_NEEDS_GPU();
  for (const int dim : {64, 128, 256}) {
    check_tf32({.dim = dim, .q_lens = {4}, .kv_lens = {reduced(20000, 2000)}}, 2);
    const int length = reduced(3000, 100);
    check_tf32({.heads = 16, .kv_heads = 4, .dim = dim, .q_lens = {length}, .kv_lens = {length}},
               3);
  }
}

/// The same bits in every run and in pages of any size, which differ from those of fp32.
TEST(Tf32, BitsRepeat) {
  LONGSPAN_NEEDS_GPU();
  for (const int dim : {24, 64, 128, 256})
    for (const int q_len : {3, 70}) {
      const std::uint64_t seed = fresh_seed();
      Serving s{
          .dim = dim, .q_lens = {q_len, 20}, .kv_lens = {reduced(5000, 300), reduced(900, 200)}};
      if (is_left_out(32 * work_of(s))) continue;
      SCOPED_TRACE(describe(s) + ", seed " + std::to_string(seed));
      s.page = 0;
      const ServingProblem rows(s, seed);
      const ServingResult one = run_option(rows, true, true);
      for (int i = 0; i < 3; ++i) expect_same_bits(one, run_option(rows, true, true));
      for (const int page : {1, 16, 48}) {
        s.page = page;
        expect_same_bits(one, run_option(ServingProblem(s, seed), true, true));
      }
      const ServingResult exact = run_option(rows, false, true);
      EXPECT_NE(std::memcmp(one.out.data(), exact.out.data(), exact.out.size()), 0);
    }
}

/// Without the option products are exact.
TEST(Tf32, OffIsExact) {
  LONGSPAN_NEEDS_GPU();
  for (const int dim : {24, 64, 128, 256})
    for (const int page : {0, 16}) {
      Serving s{.dim = dim};
      s.page = page;
      if (is_left_out(4 * work_of(s))) continue;
      const ServingProblem problem(s, fresh_seed());
      const ServingResult found = run_option(problem, false);
      const Verdict verdict =
          judge(problem, found.out, found.lse, problem.all_rows(), problem.tolerance(), 8);
      EXPECT_TRUE(verdict.right()) << verdict.first;
    }
}

}  // namespace
}  // namespace longspan::tests
