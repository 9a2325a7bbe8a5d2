// The laws of the state algebra, on random states.
#include "longspan/state.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace longspan {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

/// A state with one element of o.
struct State {
  Stats stats;
  float o;
};

State merge(State a, State b) {
  const Fold f = fold(a.stats, b.stats);
  return {f.stats, f(a.o, b.o)};
}

bool same_bits(float a, float b) {
  return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b) ||
         (std::isnan(a) && std::isnan(b));
}

bool same_bits(State a, State b) {
  return same_bits(a.stats.sum, b.stats.sum) &&
         (is_empty(a.stats) || (same_bits(a.stats.max, b.stats.max) && same_bits(a.o, b.o)));
}

/// A score's max from -1e30 to 1e30, most of order 1; sums from 1 to 1e6, as in kernels.
rc::Gen<State> arbitrary_state() {
  return rc::gen::map(
      rc::gen::resize(
          rc::kNominalSize,
          rc::gen::tuple(rc::gen::inRange(0, 12), rc::gen::inRange(-1000000, 1000001),
                         rc::gen::inRange(0, 1000001), rc::gen::inRange(-1000000, 1000001))),
      [](const std::tuple<int, int, int, int>& t) -> State {
        const auto [kind, max, sum, o] = t;
        const float unit = static_cast<float>(max) * 1e-6f;
        const State normal{{unit * 20.0f, 1.0f + static_cast<float>(sum) * 1e-2f},
                           static_cast<float>(o) * 1e-3f};
        switch (kind) {
          case 0:
            return {empty_stats(), 0.0f};
          case 1:
            return {{kNaN, 0.0f}, kNaN};  // empty, with a payload that must not be read
          case 2:
            return {{unit * 1e30f, normal.stats.sum}, normal.o};
          case 3:
            return {{unit * 1e-30f, normal.stats.sum}, normal.o};
          default:
            return normal;
        }
      });
}

RC_GTEST_PROP(State, MergeIsCommutativeBitwise, ()) {
  const State a = *arbitrary_state(), b = *arbitrary_state();
  RC_ASSERT(same_bits(merge(a, b), merge(b, a)));
}

RC_GTEST_PROP(State, EmptyIsTheIdentityBitwise, ()) {
  const State a = *arbitrary_state();
  const State nothing{{kNaN, 0.0f}, kNaN};
  RC_ASSERT(same_bits(merge(a, nothing), a));
  RC_ASSERT(same_bits(merge(nothing, a), a));
}

RC_GTEST_PROP(State, MergeIsAssociativeWithinRounding, ()) {
  const State a = *arbitrary_state(), b = *arbitrary_state(), c = *arbitrary_state();
  const State left = merge(merge(a, b), c), right = merge(a, merge(b, c));
  RC_ASSERT(is_empty(left.stats) == is_empty(right.stats));
  if (is_empty(left.stats)) return;
  RC_ASSERT(same_bits(left.stats.max, right.stats.max));
  // The operands of o cancel, so its rounding is relative to the operands, not to the sum.
  float size = 0.0f;
  for (const State& s : {a, b, c})
    if (!is_empty(s.stats)) size += std::fabs(s.o) * std::exp2(s.stats.max - left.stats.max);
  RC_ASSERT(std::fabs(left.stats.sum - right.stats.sum) <= 1e-6f * left.stats.sum);
  RC_ASSERT(std::fabs(left.o - right.o) <= 2e-6f * size);
}

RC_GTEST_PROP(State, MergeEqualsTheSumItStandsFor, ()) {
  const State a = *arbitrary_state(), b = *arbitrary_state();
  RC_PRE(!is_empty(a.stats) && !is_empty(b.stats));
  const State m = merge(a, b);
  const double top = std::fmax(a.stats.max, b.stats.max);
  const double wa = std::exp2(a.stats.max - top), wb = std::exp2(b.stats.max - top);
  RC_ASSERT(m.stats.max == static_cast<float>(top));
  RC_ASSERT(std::fabs(m.stats.sum - (wa * a.stats.sum + wb * b.stats.sum)) <= 1e-6 * m.stats.sum);
  RC_ASSERT(std::fabs(m.o - (wa * a.o + wb * b.o)) <=
            1e-6 * (wa * std::fabs(a.o) + wb * std::fabs(b.o)) + 1e-30);
}

RC_GTEST_PROP(State, AFiniteScoreOfAnySizeSurvivesAnEmptyState, ()) {
  const auto exponent = *rc::gen::inRange(-30, 31);
  const auto sign = *rc::gen::arbitrary<bool>();
  const float score = (sign ? 1.0f : -1.0f) * std::pow(10.0f, static_cast<float>(exponent));
  const State one{{score, 1.0f}, 3.5f};
  const State kept = merge({empty_stats(), kNaN}, merge(one, {empty_stats(), kNaN}));
  RC_ASSERT(same_bits(kept, one));
  RC_ASSERT(finish(kept.stats)(kept.o) == 3.5f);
}

TEST(State, NaNStaysNaN) {
  const State good{{1.0f, 2.0f}, 3.0f};
  for (const State bad :
       {State{{kNaN, 2.0f}, 3.0f}, State{{1.0f, kNaN}, kNaN}, State{{-infinity(), kNaN}, kNaN}}) {
    for (const State m : {merge(good, bad), merge(bad, good), merge(bad, {empty_stats(), 0.0f})}) {
      EXPECT_FALSE(is_empty(m.stats));
      EXPECT_TRUE(std::isnan(finish(m.stats)(m.o)));
      EXPECT_TRUE(std::isnan(finish(m.stats).lse));
    }
  }
}

TEST(State, FinishOfEmptyIsZeroAndMinusInfinity) {
  EXPECT_EQ(finish({kNaN, 0.0f})(kNaN), 0.0f);
  EXPECT_EQ(finish({kNaN, 0.0f}).lse, -infinity());
}

TEST(State, FinishGivesTheNaturalLogarithm) {
  // Two keys with scores ln 2 and ln 6: exp sums to 8.
  const Stats s = fold({std::log2(2.0f), 1.0f}, {std::log2(6.0f), 1.0f}).stats;
  EXPECT_NEAR(finish(s).lse, std::log(8.0), 1e-6);
}

TEST(State, ImportNamesItsBase) {
  EXPECT_NEAR(finish(import_lse(0.7f, LogBase::e)).lse, 0.7f, 1e-6);
  EXPECT_NEAR(finish(import_lse(0.7f, LogBase::two)).lse, 0.7 * std::log(2.0), 1e-6);
}

/// Base 2 cannot represent a natural score past 2.3e38, and infinity must not replace one: the
/// difference of two of them would be NaN.
TEST(State, AFiniteScoreOfAnySizeIsFiniteInBaseTwo) {
  constexpr float kMost = std::numeric_limits<float>::max();
  for (const float score : {2.5e38f, 3e38f, kMost})
    for (const float sign : {1.0f, -1.0f}) {
      EXPECT_EQ(to_base_2(sign * score), sign * kMost);
      for (const Stats one : {import_lse(sign * score, LogBase::e), sink_stats(sign * score)}) {
        EXPECT_EQ(one.max, sign * kMost);
        EXPECT_EQ(one.sum, 1.0f);
        const Stats two = fold(one, one).stats;
        EXPECT_EQ(two.sum, 2.0f);
        EXPECT_TRUE(std::isfinite(finish(two).lse));
        const State merged = merge({one, 3.0f}, {{0.0f, 1.0f}, 5.0f});
        EXPECT_EQ(finish(merged.stats)(merged.o), sign > 0 ? 3.0f : 5.0f);
        EXPECT_TRUE(std::isfinite(finish(merged.stats).lse));
      }
    }
  EXPECT_EQ(to_base_2(infinity()), infinity());
  EXPECT_EQ(to_base_2(-infinity()), -infinity());
  EXPECT_TRUE(std::isnan(to_base_2(kNaN)));
  EXPECT_EQ(to_base_2(1.5f), 1.5f * kLog2E);
}

TEST(State, FoldsOfFinishedPartsStayInTheirBase) {
  for (const LogBase base : {LogBase::e, LogBase::two}) {
    const float unit = base == LogBase::e ? 1.0f : kLog2E;
    const Fold f = fold(part_stats(0.5f * unit), part_stats(-1.0f * unit), base);
    EXPECT_NEAR(part_lse(f.stats, base), unit * std::log(std::exp(0.5) + std::exp(-1.0)), 1e-6);
    EXPECT_NEAR(f.ratio, std::exp(-1.5), 1e-6);
    const Stats large = fold(part_stats(3e38f), part_stats(-3e38f), base).stats;
    EXPECT_EQ(part_lse(large, base), 3e38f);
    EXPECT_TRUE(is_empty(part_stats(infinity())));
    EXPECT_EQ(part_lse(part_stats(-infinity()), base), -infinity());
    EXPECT_TRUE(std::isnan(part_lse(part_stats(kNaN), base)));
    EXPECT_TRUE(is_empty(part_stats(kNaN, true)));
  }
}

TEST(State, ImportReadsBothInfinitiesAsEmpty) {
  for (LogBase base : {LogBase::e, LogBase::two}) {
    EXPECT_TRUE(is_empty(import_lse(infinity(), base)));
    EXPECT_TRUE(is_empty(import_lse(-infinity(), base)));
    EXPECT_FALSE(is_empty(import_lse(kNaN, base)));
    EXPECT_TRUE(is_empty(import_lse(kNaN, base, true)));
  }
}

TEST(State, ImportedPairsMergeLikeTheStatesTheyCameFrom) {
  const State a{{3.0f, 2.0f}, 5.0f}, b{{1.5f, 7.0f}, -4.0f};
  const auto through_lse = [](State s) {
    const Finish f = finish(s.stats);
    return State{import_lse(f.lse, LogBase::e), f(s.o)};
  };
  const State direct = merge(a, b), imported = merge(through_lse(a), through_lse(b));
  EXPECT_NEAR(finish(direct.stats)(direct.o), finish(imported.stats)(imported.o), 1e-6);
  EXPECT_NEAR(finish(direct.stats).lse, finish(imported.stats).lse, 1e-6);
}

TEST(State, ASinkTakesProbabilityAndAddsNoValue) {
  const State keys{{0.0f, 3.0f}, 6.0f};  // three keys of score 0
  const State with = merge(keys, {sink_stats(0.0f), 0.0f});
  EXPECT_FLOAT_EQ(finish(with.stats)(with.o), 6.0f / 4.0f);
  EXPECT_NEAR(finish(with.stats).lse, std::log(4.0), 1e-6);
}

TEST(State, ASinkAloneGivesZeroAndItsOwnLse) {
  const State alone = merge({empty_stats(), kNaN}, {sink_stats(1.25f), 0.0f});
  EXPECT_EQ(finish(alone.stats)(alone.o), 0.0f);
  EXPECT_NEAR(finish(alone.stats).lse, 1.25f, 1e-6);
}

}  // namespace
}  // namespace longspan
