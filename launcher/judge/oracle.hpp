// The oracle: attention of one query row in float64, with the softmax materialised. It is naive on
// purpose, and shares no code with the kernels but the meaning of a mask.
//
//     s_j = score(q . k_j) + bias_j for visible j,  p = exp(s - max s),  out = sum p_j v_j / sum p
#pragma once

#include <Eigen/Core>
#include <cmath>
#include <limits>
#include <optional>
#include <span>

#include "longspan/mask.hpp"

namespace longspan::launcher {

using RowMajor = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

struct Exact {
  Eigen::VectorXd out;  // [dim]
  double lse;           // natural log, with the sink; -inf when nothing is visible
};

/// Attends one row. keys and values are [kv_len, dim]: the whole sequence of one kv head, in order
/// of position; they may be blocks of a larger matrix. A sink takes part in the sum and adds no
/// value. `bias` [kv_len] (ALiBi, qq_bias; natural units) is added to the scores; -inf hides its
/// key: neither its score nor its value counts, whatever they hold.
inline Exact attend_exactly(const Eigen::VectorXd& q, const Eigen::Ref<const RowMajor>& keys,
                            const Eigen::Ref<const RowMajor>& values, Interval visible,
                            double scale, double softcap = 0,
                            std::optional<double> sink = std::nullopt,
                            std::span<const double> bias = {}) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  Exact exact{Eigen::VectorXd::Zero(values.cols()), sink.value_or(-kInfinity)};
  if (visible.empty()) return exact;
  const Eigen::Index first = visible.begin, count = visible.end - visible.begin;

  Eigen::ArrayXd s = (keys.middleRows(first, count) * q).array() * scale;
  if (softcap != 0) s = softcap * (s / softcap).tanh();
  bool some_hidden = false;
  for (Eigen::Index j = 0; j < count && !bias.empty(); ++j) {
    const double extra = bias[first + j];
    s[j] = extra == -kInfinity ? extra : s[j] + extra;
    some_hidden = some_hidden || s[j] == -kInfinity;
  }
  const double top = std::max(s.maxCoeff(), sink.value_or(-kInfinity));
  if (top == -kInfinity) return exact;
  const Eigen::VectorXd p = (s - top).exp();
  const double sum = p.sum() + (sink ? std::exp(*sink - top) : 0.0);
  if (some_hidden) {
    for (Eigen::Index j = 0; j < count; ++j)
      if (s[j] != -kInfinity) exact.out += p[j] / sum * values.row(first + j).transpose();
  } else {
    exact.out = values.middleRows(first, count).transpose() * p / sum;
  }
  exact.lse = top + std::log(sum);
  return exact;
}

}  // namespace longspan::launcher
