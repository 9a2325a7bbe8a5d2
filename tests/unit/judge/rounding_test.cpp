// The bound of a lse's error, compared with tensor cores emulated bit by bit: right values stay
// within it and come near it, wrong ones exceed it.
#include "tests/support/rounding.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "launcher/problem/elements.hpp"
#include "tests/support/fresh_seed.hpp"

namespace longspan::tests {
namespace {

/// A step's addends, cut at a unit of the largest one's exponent, and their sum cut to fp32.
double add_group(const TensorCore& core, std::span<const double> products, double sum) {
  int exponent = std::ilogb(sum);
  for (const double product : products) exponent = std::max(exponent, std::ilogb(product));
  if (exponent == FP_ILOGB0) return 0;
  const double unit = std::ldexp(1.0, exponent - 23 - core.bits);
  double units = std::trunc(sum / unit);
  for (const double product : products) units += std::trunc(product / unit);
  const double whole = units * unit;
  if (whole == 0) return 0;
  const double last = std::ldexp(1.0, std::ilogb(whole) - 23);
  return std::trunc(whole / last) * last;
}

/// The products of q with each key as the core adds them.
Eigen::ArrayXd emulated(const TensorCore& core, const Eigen::VectorXd& q,
                        const launcher::RowMajor& keys) {
  Eigen::ArrayXd sums(keys.rows());
  std::vector<double> group;
  for (Eigen::Index j = 0; j < keys.rows(); ++j) {
    double sum = 0;
    for (Eigen::Index d = 0; d < q.size(); d += core.products) {
      group.clear();
      for (Eigen::Index i = d; i < std::min<Eigen::Index>(d + core.products, q.size()); ++i)
        group.push_back(q[i] * keys(j, i));
      sum = add_group(core, group, sum);
    }
    sums[j] = sum;
  }
  return sums;
}

double lse_of(const Eigen::ArrayXd& scores) {
  const double top = scores.maxCoeff();
  return top + std::log((scores - top).exp().sum());
}

struct Row {
  Eigen::VectorXd q;
  launcher::RowMajor keys;
  double scale, lse;
  Eigen::ArrayXd scores() const { return (keys * q).array() * scale; }
};

/// Elements of order 1 in fp16.
Row draw(std::mt19937& random, int dim, int keys, double scale) {
  std::normal_distribution<float> normal;
  const auto element = [&] { return launcher::rounded(DType::fp16, normal(random)); };
  Row row{Eigen::VectorXd(dim), launcher::RowMajor(keys, dim), scale, 0};
  for (double& x : row.q) x = element();
  for (Eigen::Index i = 0; i < row.keys.size(); ++i) row.keys.data()[i] = element();
  row.lse = lse_of(row.scores());
  return row;
}

double error_of(const TensorCore& core, const Row& row) {
  return std::abs(lse_of(emulated(core, row.q, row.keys) * row.scale) - row.lse);
}

/// The largest share of the bound of a product of q and a key.
double share_lost(const TensorCore& core, const Row& row) {
  const Eigen::ArrayXd off = emulated(core, row.q, row.keys) - (row.keys * row.q).array();
  return (off.abs() / core.lost(row.q, row.keys)).maxCoeff();
}

double bound_of(const TensorCore& core, const Row& row) {
  return lse_bound(core, row.q, row.keys, row.scale, 0, {}, 0, row.lse);
}

/// f(core, dim, scale, keys), rows of few keys among them, whose lse may be 0 where sums were
/// large.
template <class F>
void for_shapes(const F& f) {
  for (const int major : {8, 9})
    for (const int dim : {16, 72, 128, 240})
      for (const double scale : {1 / std::sqrt(dim), 0.6})
        for (const int keys : {1, 3, 100}) f(TensorCore::of(major), dim, scale, keys);
}

TEST(LseBound, HoldsForTensorCoresAndIsNotFarFromThem) {
  const unsigned seed = fresh_seed();
  std::mt19937 random(seed);
  for_shapes([&](const TensorCore& core, int dim, double scale, int keys) {
    double share = 0;
    for (int i = 0; i < 100; ++i) {
      const Row row = draw(random, dim, keys, scale);
      EXPECT_LE(error_of(core, row), bound_of(core, row))
          << "dim " << dim << " scale " << scale << " keys " << keys << " seed " << seed;
      share = std::max(share, share_lost(core, row));
    }
    EXPECT_LE(share, 1.0) << "dim " << dim << " seed " << seed;
    EXPECT_GT(share, 0.03) << "dim " << dim << " seed " << seed;
  });
}

/// Sums that keep 14 bits, as those of fp8 do, in place of 24.
TEST(LseBound, FindsShortSums) {
  const unsigned seed = fresh_seed();
  std::mt19937 random(seed);
  for_shapes([&](const TensorCore& core, int dim, double scale, int keys) {
    if (dim < 72 || keys > 3) return;
    int found = 0;
    for (int i = 0; i < 100; ++i) {
      const Row row = draw(random, dim, keys, scale);
      found += error_of({core.products, -10}, row) > bound_of(core, row);
    }
    EXPECT_GT(found, 80) << "dim " << dim << " scale " << scale << " keys " << keys << " seed "
                         << seed;
  });
}

/// A scale off by 2^-12 of itself, and a key left out: the heaviest, or any where scores are of
/// order 1.
TEST(LseBound, FindsWrongScalesAndKeys) {
  const unsigned seed = fresh_seed();
  std::mt19937 random(seed);
  for_shapes([&](const TensorCore& core, int dim, double scale, int keys) {
    int scales = 0, heaviest = 0, any = 0;
    for (int i = 0; i < 100; ++i) {
      const Row row = draw(random, dim, keys, scale);
      const double bound = bound_of(core, row);
      const Eigen::ArrayXd weights = (row.scores() - row.lse).exp();
      const auto left_out = [&](double weight) { return -std::log1p(-weight) > bound; };
      scales += std::abs(lse_of(row.scores() * (1 + 0x1p-12)) - row.lse) > bound;
      heaviest += left_out(weights.maxCoeff());
      any += left_out(weights[static_cast<Eigen::Index>(random() % weights.size())]);
    }
    const std::string shape = "dim " + std::to_string(dim) + " scale " + std::to_string(scale) +
                              " keys " + std::to_string(keys) + " seed " + std::to_string(seed);
    EXPECT_GT(scales, 80) << shape;
    EXPECT_EQ(heaviest, 100) << shape;
    if (scale != 0.6) {
      EXPECT_GT(any, 80) << shape;
    }
  });
}

}  // namespace
}  // namespace longspan::tests
