// The possible error of scores that a GPU computes from 16-bit numbers, and so of a row's lse: a
// bound of its arithmetic, computed for each row.
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <span>

#include "launcher/judge/oracle.hpp"

namespace longspan::tests {

/// A tensor core multiplies exactly and adds a group of products and the sum so far in one step. It
/// aligns all of them to the exponent of the largest, keeps some bits below those of fp32 and cuts
/// off the rest, then cuts the sum to fp32. With M the largest of the addends and S the sum, the
/// error of a step is less than
///
///     (products + 1) 2^-(23 + bits) M + 2^-23 S
///
/// (the model of Khattak and Mikaitis, arXiv 2512.07004).
struct TensorCore {
  int products;  // in a group
  int bits;

  static TensorCore of(int major) {  // compute capability
    return major >= 9 ? TensorCore{16, 2} : TensorCore{8, 1};
  }

  /// For the products of q with each of the keys. The kernels add one group after the other, from 0
  /// and in the order of dims. A sum that cancels has the error of its larger partial sums, so this
  /// does not shrink with the score.
  Eigen::ArrayXd lost(const Eigen::VectorXd& q,
                      const Eigen::Ref<const launcher::RowMajor>& keys) const {
    const double of_largest = (products + 1) * std::ldexp(1.0, -23 - bits);
    Eigen::ArrayXd lost(keys.rows());
    for (Eigen::Index j = 0; j < keys.rows(); ++j) {
      double sum = 0, off = 0;
      for (Eigen::Index first = 0; first < q.size(); first += products) {
        const Eigen::Index last = std::min<Eigen::Index>(first + products, q.size());
        double largest = std::abs(sum);
        for (Eigen::Index d = first; d < last; ++d) {
          const double product = q[d] * keys(j, d);
          largest = std::max(largest, std::abs(product));
          sum += product;
        }
        off += of_largest * largest + 0x1p-23 * std::abs(sum);
      }
      lost[j] = 1.01 * off;  // the computed sums are themselves off
    }
    return lost;
  }
};

/// For the lse of a row that sees these keys, with a `bias` of each or none. A kernel may hold
/// biases less `lift`, and add that to the row's maximum at the end. With u = 2^-24, of one
/// rounding in fp32, and in first order, the error of a score s_j is the sum of
///
///     slope |scale| lost_j   slope of a cap there, or 1
///     4 u |s_j|              the factor, in base 2, is rounded twice, its product and the sum with
///                            a bias once
///     6 u |s_j|              a cap, in its fast forms
///     8 u (|b_j| + lift)     a bias, which may be that of a tile's middle and a rest
///
/// and the lse by the sum of
///
///     sum_j w_j |ds_j|       w_j = exp(s_j - lse); they sum to 1, or to less beside a sink
///     2e-6                   33 u: exp2 to 4 u, the others for fp32 sums of positive numbers,
///                            rounded to nearest
///     4 u (|lse| + log keys) the maximum, lifted and lowered; what goes into exp2; the sum's
///                            logarithm, and its sum with the maximum
inline double lse_bound(const TensorCore& core, const Eigen::VectorXd& q,
                        const Eigen::Ref<const launcher::RowMajor>& keys, double scale,
                        double softcap, std::span<const double> bias, double lift, double lse) {
  constexpr double kUnit = 0x1p-24, kSums = 2e-6;
  Eigen::ArrayXd s = (keys * q).array() * scale;
  Eigen::ArrayXd off = core.lost(q, keys) * std::abs(scale);
  if (softcap != 0) {
    const Eigen::ArrayXd nearest = (s.abs() - off).max(0.0) / softcap;  // where it is steepest
    off *= 1 - nearest.tanh().square();
    s = softcap * (s / softcap).tanh();
  }
  off += (softcap != 0 ? 10 : 4) * kUnit * s.abs();
  if (!bias.empty()) {
    const Eigen::Map<const Eigen::ArrayXd> added(bias.data(), s.size());
    off += 8 * kUnit * (added.abs() + lift);
    s += added;
  }
  const double moved = ((s - lse).exp() * off.expm1()).sum();
  const double size =
      std::abs(lse) + std::log(static_cast<double>(std::max<Eigen::Index>(1, s.size())));
  return -std::log1p(-std::min(moved, 0.5)) + kSums + 4 * kUnit * size;
}

}  // namespace longspan::tests
