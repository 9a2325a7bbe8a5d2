// The oracle of gradients, by finite differences of the oracle of results.
#include "launcher/judge/gradients.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <random>
#include <vector>

#include "tests/support/fresh_seed.hpp"

namespace longspan::launcher {
namespace {

constexpr int kKeys = 7, kDim = 5, kValueDim = 3;

struct Row {
  VectorOf<double> q = VectorOf<double>::Zero(kDim), dout = VectorOf<double>::Zero(kValueDim);
  RowMajor keys = RowMajor::Zero(kKeys, kDim), values = RowMajor::Zero(kKeys, kValueDim);
  std::vector<double> bias;
  std::optional<double> sink;
  double dlse = 0, softcap = 0;
  Interval visible{1, 6};
  static constexpr double kScale = 0.6;

  double loss() const {
    const Exact e = attend_exactly(q, keys, values, visible, kScale, softcap, sink, bias);
    return dout.dot(e.out) + dlse * e.lse;
  }
};

Row random_row(std::mt19937& random, bool with_softcap, bool with_bias, bool with_sink) {
  std::normal_distribution<double> normal;
  const auto fill = [&](auto& m) {
    for (Eigen::Index i = 0; i < m.size(); ++i) m.data()[i] = normal(random);
  };
  Row row;
  fill(row.q), fill(row.dout), fill(row.keys), fill(row.values);
  row.dlse = normal(random);
  if (with_softcap) row.softcap = 1.3;
  if (with_bias) {
    for (int j = 0; j < kKeys; ++j) row.bias.push_back(normal(random));
    row.bias[2] = -std::numeric_limits<double>::infinity();
  }
  if (with_sink) row.sink = normal(random);
  return row;
}

/// The loss falls or rises with one input as its gradient says, to the error of a central
/// difference.
void expect_slope(Row& row, double& input, double gradient, const char* name) {
  constexpr double kStep = 1e-5;
  const double at = input;
  input = at + kStep;
  const double above = row.loss();
  input = at - kStep;
  const double below = row.loss();
  input = at;
  EXPECT_NEAR((above - below) / (2 * kStep), gradient, 1e-8) << name;
}

TEST(OracleOfGradients, AgreesWithFiniteDifferences) {
  std::mt19937 random(tests::fresh_seed());
  for (int options = 0; options < 8; ++options) {
    SCOPED_TRACE(options);
    Row row = random_row(random, options & 1, options & 2, options & 4);
    GradientsOf<double> sums{RowMajor::Zero(kKeys, kDim), RowMajor::Zero(kKeys, kValueDim)};
    const RowGradients<double> own =
        add_gradients<double>(row.q, row.keys, row.values, row.visible, Row::kScale, row.softcap,
                              row.sink, row.bias, row.dout, row.dlse, sums);
    for (int c = 0; c < kDim; ++c) expect_slope(row, row.q[c], own.dq[c], "dq");
    for (int j = 0; j < kKeys; ++j) {
      for (int c = 0; c < kDim; ++c) expect_slope(row, row.keys(j, c), sums.dk(j, c), "dk");
      for (int c = 0; c < kValueDim; ++c) expect_slope(row, row.values(j, c), sums.dv(j, c), "dv");
      if (!row.bias.empty() && j != 2) expect_slope(row, row.bias[j], own.dbias[j], "dbias");
    }
    if (row.sink) expect_slope(row, *row.sink, own.dsink, "dsink");
    EXPECT_EQ(sums.dk.row(0).norm(), 0.0);  // outside of what is visible
    if (!row.bias.empty()) {
      EXPECT_EQ(sums.dv.row(2).norm(), 0.0);  // hidden by its bias
    }
  }
}

TEST(OracleOfGradients, TurnsBackByTheTransposeOfARotation) {
  std::mt19937 random(tests::fresh_seed());
  for (const bool interleaved : {false, true}) {
    Row row = random_row(random, true, true, false);
    const RopeOptions rope{.dim = 4, .interleaved = interleaved, .base = 50.0f};
    const VectorOf<double> q = row.q;
    const auto angles = [&](int pair) { return cos_sin_of(rope, 9, pair); };
    const auto loss = [&](const VectorOf<double>& from) {
      row.q = from;
      rotate(row.q, rope, angles, false);
      return row.loss();
    };
    loss(q);
    GradientsOf<double> sums{RowMajor::Zero(kKeys, kDim), RowMajor::Zero(kKeys, kValueDim)};
    VectorOf<double> dq =
        add_gradients<double>(row.q, row.keys, row.values, row.visible, Row::kScale, row.softcap,
                              row.sink, row.bias, row.dout, row.dlse, sums)
            .dq;
    rotate(dq, rope, angles, true);
    for (int c = 0; c < kDim; ++c) {
      const VectorOf<double> step = VectorOf<double>::Unit(kDim, c) * 1e-5;
      EXPECT_NEAR((loss(q + step) - loss(q - step)) / 2e-5, dq[c], 1e-8) << c;
    }
  }
}

TEST(OracleOfGradients, ARowThatSeesNothingHasNone) {
  std::mt19937 random(tests::fresh_seed());
  Row row = random_row(random, false, false, false);
  row.visible = {3, 3};
  row.dout.setConstant(std::numeric_limits<double>::quiet_NaN());
  GradientsOf<double> sums{RowMajor::Zero(kKeys, kDim), RowMajor::Zero(kKeys, kValueDim)};
  const RowGradients<double> own =
      add_gradients<double>(row.q, row.keys, row.values, row.visible, Row::kScale, 0.0,
                            std::nullopt, {}, row.dout, row.dlse, sums);
  EXPECT_EQ(own.dq.norm() + sums.dk.norm() + sums.dv.norm(), 0.0);
}

}  // namespace
}  // namespace longspan::launcher
