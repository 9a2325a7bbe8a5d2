// Bounds how far fp32 arithmetic may move gradients from the exact ones, as rounding.hpp does for
// results (first order; u = 2^-24). A score is off by a_j of rounding.hpp, so a weight by p_j a_j;
// dP_j = dout.v_j and D, sums of products as well, by e_j and e_D. With dX_j = scale slope_j p_j
// (dP_j - D), where slope_j is that of the softcap,
//
//     dX_j is off by   scale slope_j p_j hypot((dP_j - D) a_j, e_j, e_D)
//
// Rounding differs from key to key and from row to row, so that errors add up by their squares.
// That of D is common to all keys of a row: dq takes it as e_D |sum_j scale slope_j p_j k_j|. The
// gradients cancel where a row has few keys, as dP_j is near D there: then this bound matters.
#pragma once

#include <cmath>
#include <span>

#include "launcher/judge/gradients.hpp"
#include "longspan/order.hpp"

namespace longspan::launcher {

/// The squares of errors that rows add to gradients of keys, in units of 2 u.
struct KeySquares {
  RowMajor dk;  // [keys, head_dim]
  RowMajor dv;  // [keys, value_dim]
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

/// The bound of the row's dq; adds to the squares of keys, if given.
inline Eigen::VectorXd rounding_of_gradients(const WeighedRow& row, KeySquares* keys = nullptr) {
  constexpr double kUnit = 0x1p-23, kTerms = kSegment / 2.0;
  const auto& [p, ds, dx, dsink] = row.weights;
  const double serial = static_cast<double>(row.q.size()) / 2;
  const double serial_values = static_cast<double>(row.dout.size()) / 2;
  const double unit2 = row.unit / kUnit * (row.unit / kUnit);
  const double d = row.dout.dot(row.out) - row.dlse;
  const double d2 = serial_values * (d * d + (row.dout.array() * row.out.array()).square().sum()) +
                    row.dlse * row.dlse + d * d;
  Eigen::ArrayXd squares = Eigen::ArrayXd::Zero(row.q.size()), common = squares, dq = squares;
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
    const Eigen::ArrayXd grown = row.values.row(j).transpose().array() * row.dout.array();
    const double dp = grown.sum();
    const double dp2 = serial_values * (dp * dp + grown.square().sum()) + dp * dp;
    const double tanh2 = 9 * capped * capped * row.scale * row.scale * ds[j] * ds[j];
    const double own2 = turn * turn * p[j] * p[j] * ((dp - d) * (dp - d) * score2 + dp2) + tanh2;
    const double sum2 = (kTerms + unit2) * dx[j] * dx[j];
    squares += (own2 + sum2) * key.square();
    common += turn * p[j] * key;
    dq += dx[j] * key;
    if (!keys) continue;
    keys->dk.row(j) += ((own2 + turn * turn * p[j] * p[j] * d2 + sum2) * q2).matrix().transpose();
    keys->dv.row(j) += (p[j] * p[j] * (score2 + kTerms) * dout2).matrix().transpose();
  }
  return kUnit * ((squares + kTerms * dq.square()).sqrt() + std::sqrt(d2) * common.abs() +
                  std::abs(row.lse) * dq.abs());
}

}  // namespace longspan::launcher
