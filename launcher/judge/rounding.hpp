// Bounds how far fp32 arithmetic may move one query row from the exact result, by the data of this
// row (u = 2^-24; first order; docs/reference/command.md has it in words). A score is a sum of dim
// products. Rounded as it grows, in any order of typical partial sums, it is off by about
//
//     r_j = u sqrt(dim / 2) hypot(x_j, n_j)     x_j = scale q.k_j, n_j = |scale| |q o k_j|
//
// and later steps (softcap, bias, the conversion to base 2) each round numbers of the size of the
// score once more: a_j = hypot(r_j, u f_j, u t_j, u b_j) for the final score f = t + b. Since
//
//     d out / d f_j = p_j (v_j - out)           d lse / d f_j = p_j
//
// rounding, which differs from key to key, moves an element by sqrt(sum (p_j a_j (v_j - out))^2);
// the sums of a segment's values add sqrt(c (out^2 + sum (p_j v_j)^2)), c = half a segment's keys;
// and the factor log2(e) scale, rounded once for all keys, adds u |sum p_j f_j (v_j - out)|. Where
// one key has all the weight the first and last are nothing, however large the scores are. With
// dropout z_j v_j takes the place of v_j.
#pragma once

#include <algorithm>
#include <cmath>

#include "launcher/judge/oracle.hpp"
#include "longspan/order.hpp"

namespace longspan::launcher {

/// The bounds of the error: twice the terms above, which for the random part is 3.5 standard
/// deviations of numbers that are rounded to nearest.
struct Rounding {
  Eigen::VectorXd out;  // [dim]
  double lse = 0;
};

/// Takes the arguments of attend_exactly, and its result. `unit` is 2 u of the scores.
inline Rounding rounding_of(const Eigen::VectorXd& q, const Eigen::Ref<const RowMajor>& keys,
                            const Eigen::Ref<const RowMajor>& values, Interval visible,
                            double scale, double softcap, std::span<const double> bias,
                            const Exact& exact, double unit = 0x1p-23,
                            std::span<const double> kept = {}) {
  constexpr double kUnit = 0x1p-23;
  Rounding bound{Eigen::VectorXd::Zero(values.cols()), 0};
  if (visible.empty() || !std::isfinite(exact.lse)) return bound;
  const Eigen::Index first = visible.begin, count = visible.end - visible.begin;
  const double serial = static_cast<double>(q.size()) / 2;

  Eigen::ArrayXd scores2 = bound.out, sums2 = bound.out, common = bound.out, biased = bound.out;
  const Eigen::ArrayXd scaled = q.array() * scale;
  Eigen::ArrayXd products(q.size()), pull(values.cols()), value;
  double lse2 = 0;
  for (Eigen::Index j = 0; j < count; ++j) {
    const double extra = bias.empty() ? 0.0 : bias[first + j];
    if (extra == -std::numeric_limits<double>::infinity()) continue;
    products = keys.row(first + j).transpose().array() * scaled;
    const double x = products.sum();
    const double capped = softcap != 0 ? std::tanh(x / softcap) : 0.0;
    const double t = softcap != 0 ? softcap * capped : x;
    const double slope = 1 - capped * capped;
    const double p = std::exp(t + extra - exact.lse);
    if (p == 0) continue;  // then its value may be anything

    const double rounded2 = slope * slope * serial * (x * x + products.square().sum()) + t * t +
                            (t + extra) * (t + extra) + extra * extra;
    const double z = kept.empty() ? 1.0 : kept[first + j];
    value = z == 0 ? Eigen::ArrayXd::Zero(values.cols())
                   : Eigen::ArrayXd(z * values.row(first + j).transpose().array());
    pull = p * (value - exact.out.array());
    scores2 += rounded2 * pull.square();
    sums2 += p * p * value.square();
    common += (t + extra) * pull;
    if (extra != 0) biased += extra * pull;
    lse2 += p * p * rounded2;
  }
  const double half_segment = static_cast<double>(std::min<Eigen::Index>(count, kSegment)) / 2;
  const Eigen::ArrayXd summed = half_segment * (exact.out.array().square() + sums2);
  bound.out = (unit * unit * scores2 + kUnit * kUnit * summed).sqrt() +
              kUnit * (common.abs() + biased.abs());
  bound.lse = unit * std::sqrt(lse2);
  return bound;
}

}  // namespace longspan::launcher
