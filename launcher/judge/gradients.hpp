// The gradients of one query row, with everything materialised: the oracle in float64, and in fp32
// the yardstick of what a user has on one device. With D = sum(dout * out) - dlse,
//
//     dP_j = dout.v_j,   dS_j = p_j (dP_j - D),   dX_j = dS_j (1 - tanh(x_j / softcap)^2)
//     dq = scale sum_j dX_j k_j,   dk_j = scale dX_j q,   dv_j = p_j dout
//     d bias_j = dS_j,   d sink = -exp(sink - lse) D
//
// With dropout z_j dP_j takes the place of dP_j, and z_j p_j that of p_j in dv and in out.
//
// It calls no code of the library. gradients_test checks it by finite differences.
#pragma once

#include <Eigen/Core>
#include <cmath>
#include <limits>
#include <optional>
#include <span>

#include "launcher/judge/oracle.hpp"

namespace longspan::launcher {

template <class Real>
using MatrixOf = Eigen::Matrix<Real, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
template <class Real>
using VectorOf = Eigen::Matrix<Real, Eigen::Dynamic, 1>;

/// What is added to the gradients of a kv head by one row.
template <class Real>
struct GradientsOf {
  MatrixOf<Real> dk;  // [kv_len, head_dim]
  MatrixOf<Real> dv;  // [kv_len, value_dim]
};

/// The gradients that are a row's own.
template <class Real>
struct RowGradients {
  VectorOf<Real> dq;     // [head_dim]
  VectorOf<Real> dbias;  // [kv_len], with respect to bias, also where none was given
  Real dsink = 0;
};

/// The sum of products, one by one, as the product of matrices adds them up.
template <class Real, class A, class B>
Real dot_product(const A& a, const B& b) {
  Real sum = 0;
  for (Eigen::Index c = 0; c < a.size(); ++c) sum += a[c] * b[c];
  return sum;
}

/// Rotates a row by RoPE, or turns the gradient of a rotated row into that of the row before, by
/// the transpose. `cos_sin(i)` is the cosine and the sine of pair i.
template <class Real, class CosSin>
void rotate(VectorOf<Real>& row, const RopeOptions& rope, const CosSin& cos_sin, bool back) {
  for (int i = 0; i < rope.dim / 2; ++i) {
    Real& x = row[rope.interleaved ? 2 * i : i];
    Real& y = row[rope.interleaved ? 2 * i + 1 : rope.dim / 2 + i];
    const auto by = cos_sin(i);
    const auto cos = static_cast<Real>(by.first),
               sin = static_cast<Real>(back ? -by.second : by.second);
    const Real turned = x * cos - y * sin;
    y = x * sin + y * cos;
    x = turned;
  }
}

/// The results of a row, as backward is given them.
template <class Real>
struct RowResult {
  VectorOf<Real> out;  // [value_dim]
  Real lse;
};

/// What the sums of a row add up, for each key of the sequence; zeros where it does not see the
/// key.
template <class Real>
struct RowWeights {
  VectorOf<Real> p;   // weights
  VectorOf<Real> ds;  // gradients of scores, with their bias
  VectorOf<Real> dx;  // gradients of q.k
  VectorOf<Real> zp;  // weights, with dropout times its factors
  Real dsink = 0;
};

/// The arguments are those of attend_exactly, then the gradients of its two results. Without
/// `given` it computes the results too; with it, `keys` may be some of those of the sequence.
/// `kept` are the factors of dropout for `keys`.
template <class Real>
RowWeights<Real> weigh(const VectorOf<Real>& q, const MatrixOf<Real>& keys,
                       const MatrixOf<Real>& values, Interval visible, Real scale, Real softcap,
                       std::optional<Real> sink, std::span<const Real> bias,
                       const VectorOf<Real>& dout, Real dlse,
                       const RowResult<Real>* given = nullptr, std::span<const Real> kept = {}) {
  constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
  const auto zeros = VectorOf<Real>::Zero(keys.rows());
  RowWeights<Real> row{zeros, zeros, zeros, zeros, 0};
  const auto is_seen = [&](Eigen::Index j) {
    return visible.contains(j) && (bias.empty() || bias[j] != -kInfinity);
  };
  VectorOf<Real> s = VectorOf<Real>::Constant(keys.rows(), -kInfinity), t = s;
  Real top = sink.value_or(-kInfinity);
  for (Eigen::Index j = 0; j < keys.rows(); ++j) {
    if (!is_seen(j)) continue;
    const Real x = dot_product<Real>(keys.row(j), q) * scale;
    t[j] = softcap != 0 ? std::tanh(x / softcap) : Real{0};
    s[j] = (softcap != 0 ? softcap * t[j] : x) + (bias.empty() ? Real{0} : bias[j]);
    if (!(s[j] <= top)) top = s[j];  // a NaN stays
  }
  if (top == -kInfinity) return row;
  Real sum = sink ? std::exp(*sink - top) : Real{0};
  for (Eigen::Index j = 0; j < keys.rows(); ++j)
    if (is_seen(j)) sum += std::exp(s[j] - top);
  const Real lse = given ? given->lse : top + std::log(sum);
  VectorOf<Real> out = VectorOf<Real>::Zero(values.cols());
  for (Eigen::Index j = 0; j < keys.rows(); ++j) {
    if (!is_seen(j)) continue;
    row.p[j] = std::exp(s[j] - lse);
    const Real z = kept.empty() ? Real{1} : kept[j];
    row.zp[j] = z * row.p[j];
    if (!given && z != 0) out += row.zp[j] * values.row(j).transpose();
  }
  const Real d = dot_product<Real>(dout, given ? given->out : out) - dlse;
  for (Eigen::Index j = 0; j < keys.rows(); ++j) {
    if (!is_seen(j)) continue;
    const Real z = kept.empty() ? Real{1} : kept[j];
    row.ds[j] = row.p[j] * ((z == 0 ? Real{0} : z * dot_product<Real>(values.row(j), dout)) - d);
    row.dx[j] = row.ds[j] * (softcap != 0 ? 1 - t[j] * t[j] : Real{1}) * scale;
  }
  if (sink) row.dsink = -std::exp(*sink - lse) * d;
  return row;
}

/// The gradient of the row itself: sum_j dX_j k_j.
template <class Real>
VectorOf<Real> gradient_of_row(const RowWeights<Real>& row, const MatrixOf<Real>& keys) {
  VectorOf<Real> dq = VectorOf<Real>::Zero(keys.cols());
  for (Eigen::Index j = 0; j < keys.rows(); ++j)
    if (row.p[j] != 0) dq += row.dx[j] * keys.row(j).transpose();
  return dq;
}

/// Adds the row's part to the gradients of the keys.
template <class Real>
void add_to_keys(const RowWeights<Real>& row, const VectorOf<Real>& q, const VectorOf<Real>& dout,
                 GradientsOf<Real>& sums) {
  for (Eigen::Index j = 0; j < row.p.size(); ++j) {
    if (row.p[j] == 0) continue;
    sums.dk.row(j) += row.dx[j] * q.transpose();
    sums.dv.row(j) += row.zp[j] * dout.transpose();
  }
}

/// All gradients of a row; the arguments are those of `weigh`.
template <class Real>
RowGradients<Real> add_gradients(const VectorOf<Real>& q, const MatrixOf<Real>& keys,
                                 const MatrixOf<Real>& values, Interval visible, Real scale,
                                 Real softcap, std::optional<Real> sink, std::span<const Real> bias,
                                 const VectorOf<Real>& dout, Real dlse, GradientsOf<Real>& sums,
                                 const RowResult<Real>* given = nullptr,
                                 std::span<const Real> kept = {}) {
  const RowWeights<Real> row =
      weigh(q, keys, values, visible, scale, softcap, sink, bias, dout, dlse, given, kept);
  add_to_keys(row, q, dout, sums);
  return {gradient_of_row(row, keys), row.ds, row.dsink};
}

}  // namespace longspan::launcher
