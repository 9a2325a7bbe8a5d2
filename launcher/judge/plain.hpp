// Attends as frameworks do on one device, as a yardstick, so that our error is compared with what
// users have today. Scores and sums are fp32; the probabilities are rounded to the dtype before the
// product with the values, and the result once more.
#pragma once

#include <algorithm>
#include <cmath>
#include <optional>
#include <span>

#include "launcher/judge/oracle.hpp"
#include "launcher/problem/elements.hpp"

namespace longspan::launcher {

/// The type that a result is stored as, and its scale: stored = result / scale.
struct Stored {
  DType dtype = DType::fp32;
  float scale = 1;
};

/// Takes the arguments of attend_exactly; `dtype` is that of the probabilities. e4m3 has few small
/// numbers, so there the largest probability is 256.
inline Eigen::VectorXf attend_plainly(const Eigen::VectorXd& q,
                                      const Eigen::Ref<const RowMajor>& keys,
                                      const Eigen::Ref<const RowMajor>& values, Interval visible,
                                      float scale, float softcap, std::optional<float> sink,
                                      DType dtype, std::optional<Stored> stored = std::nullopt,
                                      std::span<const double> bias = {},
                                      std::span<const double> kept = {}) {
  Eigen::VectorXf out = Eigen::VectorXf::Zero(values.cols());
  if (visible.empty()) return out;
  const Eigen::Index first = visible.begin, count = visible.end - visible.begin;

  const Eigen::RowVectorXf row = q.cast<float>();
  Eigen::ArrayXf s(count);
  for (Eigen::Index j = 0; j < count; ++j)
    s[j] = keys.row(first + j).cast<float>().dot(row) * scale;
  if (softcap != 0) s = softcap * (s / softcap).tanh();
  if (!bias.empty())
    for (Eigen::Index j = 0; j < count; ++j) s[j] += static_cast<float>(bias[first + j]);
  const float top = sink ? std::max(s.maxCoeff(), *sink) : s.maxCoeff();
  const Eigen::ArrayXf p = (s - top).exp();
  const float sum = p.sum() + (sink ? std::exp(*sink - top) : 0.0f);
  const float top_weight = dtype == DType::e4m3 ? 256.0f : 1.0f;
  for (Eigen::Index j = 0; j < count; ++j) {
    const float z = kept.empty() ? 1.0f : static_cast<float>(kept[first + j]);
    if (z != 0)
      out += z * rounded(dtype, p[j] * top_weight) / top_weight *
             values.row(first + j).transpose().cast<float>();
  }
  const Stored as = stored.value_or(Stored{dtype});
  for (float& element : out) element = rounded(as.dtype, element / sum / as.scale) * as.scale;
  return out;
}

}  // namespace longspan::launcher
