// The yardstick: attention as frameworks compute it on one device, so that our error is measured
// against what a user has today. fp32 scores and sums; the probabilities are rounded to
// the dtype before they meet the values, and the result once more.
#pragma once

#include <algorithm>
#include <cmath>
#include <optional>

#include "launcher/elements.hpp"
#include "launcher/oracle.hpp"

namespace longspan::launcher {

/// Arguments as attend_exactly's.
inline Eigen::VectorXf attend_plainly(const Eigen::VectorXd& q,
                                      const Eigen::Ref<const RowMajor>& keys,
                                      const Eigen::Ref<const RowMajor>& values, Interval visible,
                                      float scale, float softcap, std::optional<float> sink,
                                      DType dtype) {
  Eigen::VectorXf out = Eigen::VectorXf::Zero(values.cols());
  if (visible.empty()) return out;
  const Eigen::Index first = visible.begin, count = visible.end - visible.begin;

  const Eigen::RowVectorXf row = q.cast<float>();
  Eigen::ArrayXf s(count);
  for (Eigen::Index j = 0; j < count; ++j)
    s[j] = keys.row(first + j).cast<float>().dot(row) * scale;
  if (softcap != 0) s = softcap * (s / softcap).tanh();
  const float top = sink ? std::max(s.maxCoeff(), *sink) : s.maxCoeff();
  const Eigen::ArrayXf p = (s - top).exp();
  const float sum = p.sum() + (sink ? std::exp(*sink - top) : 0.0f);
  for (Eigen::Index j = 0; j < count; ++j)
    out += rounded(dtype, p[j]) * values.row(first + j).transpose().cast<float>();
  for (float& element : out) element = rounded(dtype, element / sum);
  return out;
}

}  // namespace longspan::launcher
