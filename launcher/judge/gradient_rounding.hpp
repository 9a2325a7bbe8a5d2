// Bounds how far fp32 arithmetic may move gradients from the exact ones, as rounding.hpp does for
// results (first order; u = 2^-24). A score is off by a_j of rounding.hpp, so a weight by p_j a_j;
// dP_j = dout.v_j and D, sums of products as well, by e_j and e_D. With dX_j = scale slope_j p_j
// (dP_j - D), where slope_j is that of the softcap,
//
//     dX_j is off by   scale slope_j p_j hypot((dP_j - D) a_j, e_j, e_D)
//
// Rounding differs from key to key and from row to row, so that errors add up by their squares. Two
// are common. That of D is the same for all keys of a row: dq takes it as
// e_D |sum_j scale slope_j p_j k_j|. The factors log2(e) scale and log2(e) slope (of ALiBi) are
// rounded once for a head: with f_j, the score, and b_j, its bias, they add u |sum dX_j f_j k_j|
// and u |sum dX_j b_j k_j| to dq, and the like to dk and dv.
//
// With dropout z_j dP_j takes the place of dP_j, and z_j p_j that of p_j in dv.
//
// Gradients cancel where a row has few keys, since dP_j is near D there, and grow with the scores.
// Then this bound matters.
#pragma once

#include <cmath>
#include <span>

#include "launcher/judge/gradients.hpp"
#include "longspan/order.hpp"

namespace longspan::launcher {

/// What rows of one head add to the bounds of dk [keys, head_dim] and dv [keys, value_dim], in
/// units of 2 u.
struct KeyRounding {
  RowMajor dk_squares, dv_squares;
  RowMajor dk_scores, dv_scores;  // common errors, of scores
  RowMajor dk_biases, dv_biases;  // and of biases

  KeyRounding(Eigen::Index keys, Eigen::Index head_dim, Eigen::Index value_dim)
      : dk_squares(RowMajor::Zero(keys, head_dim)),
        dv_squares(RowMajor::Zero(keys, value_dim)),
        dk_scores(dk_squares),
        dv_scores(dv_squares),
        dk_biases(dk_squares),
        dv_biases(dv_squares) {}
};

/// A row, as `weigh` takes it, and what it found. `unit` is that of the scores, 2 u or more.
struct WeighedRow {
  const Eigen::VectorXd& q;
  const RowMajor& keys;
  const RowMajor& values;
  double scale, softcap;
  std::span<const double> bias;
  const Eigen::VectorXd& dout;
  double dlse;
  const Eigen::VectorXd& out;
  double lse;
  const RowWeights<double>& weights;
  double unit = 0x1p-23;
};

/// The bound of the row's dq; adds to those of keys, if given.
inline Eigen::VectorXd rounding_of_gradients(const WeighedRow& row, KeyRounding* keys = nullptr) {
  constexpr double kUnit = 0x1p-23, kTerms = kSegment / 2.0;
  const auto& [p, ds, dx, zp, dsink] = row.weights;
  const double serial = static_cast<double>(row.q.size()) / 2;
  const double serial_values = static_cast<double>(row.dout.size()) / 2;
  const double unit2 = row.unit / kUnit * (row.unit / kUnit);
  const double d = row.dout.dot(row.out) - row.dlse;
  const double d2 = serial_values * (d * d + (row.dout.array() * row.out.array()).square().sum()) +
                    row.dlse * row.dlse + d * d;
  Eigen::ArrayXd squares = Eigen::ArrayXd::Zero(row.q.size()), of_d = squares, dq = squares;
  Eigen::ArrayXd of_scores = squares, of_biases = squares;
  const Eigen::ArrayXd q2 = row.q.array().square(), dout2 = row.dout.array().square();
  for (Eigen::Index j = 0; j < p.size(); ++j) {
    if (p[j] == 0) continue;
    const Eigen::ArrayXd key = row.keys.row(j).transpose().array();
    const Eigen::ArrayXd products = key * row.q.array() * row.scale;
    const double extra = row.bias.empty() ? 0.0 : row.bias[static_cast<std::size_t>(j)];
    const double x = products.sum();
    const double capped = row.softcap != 0 ? std::tanh(x / row.softcap) : 0.0;
    const double t = row.softcap != 0 ? row.softcap * capped : x;
    const double slope = 1 - capped * capped, turn = row.scale * slope;
    const double score2 = unit2 * (slope * slope * serial * (x * x + products.square().sum()) +
                                   t * t + (t + extra) * (t + extra) + extra * extra);
    const double z = zp[j] / p[j];
    const Eigen::ArrayXd grown =
        z == 0 ? Eigen::ArrayXd::Zero(row.dout.size())
               : Eigen::ArrayXd(z * row.values.row(j).transpose().array() * row.dout.array());
    const double dp = grown.sum();
    const double dp2 = serial_values * (dp * dp + grown.square().sum()) + dp * dp;
    const double tanh2 = 9 * capped * capped * row.scale * row.scale * ds[j] * ds[j];
    const double own2 = turn * turn * p[j] * p[j] * ((dp - d) * (dp - d) * score2 + dp2) + tanh2;
    const double sum2 = (kTerms + unit2) * dx[j] * dx[j];
    squares += (own2 + sum2) * key.square();
    of_d += turn * p[j] * key;
    of_scores += dx[j] * (t + extra) * key;
    of_biases += dx[j] * extra * key;
    dq += dx[j] * key;
    if (!keys) continue;
    keys->dk_squares.row(j) +=
        ((own2 + turn * turn * p[j] * p[j] * d2 + sum2) * q2).matrix().transpose();
    keys->dv_squares.row(j) += (zp[j] * zp[j] * (score2 + kTerms) * dout2).matrix().transpose();
    keys->dk_scores.row(j) += dx[j] * (t + extra) * row.q.transpose();
    keys->dv_scores.row(j) += zp[j] * (t + extra) * row.dout.transpose();
    keys->dk_biases.row(j) += dx[j] * extra * row.q.transpose();
    keys->dv_biases.row(j) += zp[j] * extra * row.dout.transpose();
  }
  return kUnit * ((squares + kTerms * dq.square()).sqrt() + std::sqrt(d2) * of_d.abs() +
                  of_scores.abs() + of_biases.abs() + std::abs(row.lse) * dq.abs());
}

}  // namespace longspan::launcher
