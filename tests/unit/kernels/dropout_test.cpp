// The mask of dropout: its words are Random123's, and its decisions are as likely as p says and
// independent of each other, by statistics with a fixed seed.
#include "kernels/dropout.hpp"

#include <Random123/philox.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>

#include "launcher/judge/oracle.hpp"

namespace longspan::kernels {
namespace {

std::uint32_t low(std::uint64_t x) { return static_cast<std::uint32_t>(x); }

TEST(Dropout, WordsAreRandom123s) {
  std::mt19937_64 random(1);
  const r123::Philox4x32 theirs;
  for (int i = 0; i < 1000; ++i) {
    const std::uint64_t a = random(), b = random(), c = random();
    const auto wanted =
        theirs({{low(a), low(a >> 32), low(b), low(b >> 32)}}, {{low(c), low(c >> 32)}});
    const PhiloxWords found =
        philox({{low(a), low(a >> 32), low(b), low(b >> 32)}}, {low(c), low(c >> 32)});
    for (int w = 0; w < 4; ++w) ASSERT_EQ(found.word[w], wanted[static_cast<std::size_t>(w)]);
  }
}

TEST(Dropout, DecisionsAreThoseOfTheOracle) {
  std::mt19937_64 random(2);
  for (const double p : {0.0, 1e-12, 0.1, 0.5, 0.999}) {
    const launcher::DropoutOf of{p,
                                 random(),
                                 random(),
                                 low(random()),
                                 low(random() >> 40),
                                 static_cast<std::int64_t>(random() >> 33)};
    Dropout dropout{.on = true,
                    .threshold = dropout_threshold(p),
                    .scale = static_cast<float>(1 / (1 - p)),
                    .own_seed = static_cast<std::int64_t>(of.seed),
                    .own_offset = static_cast<std::int64_t>(of.offset)};
    const DropoutRow row{dropout.key(), of.sequence, of.head,
                         low(static_cast<std::uint64_t>(of.position))};
    const std::vector<double> wanted = launcher::dropout_factors<float>(of, 1000);
    for (std::int64_t j = 0; j < 1000; ++j)
      ASSERT_EQ(dropout.factor(row.one(j)), wanted[static_cast<std::size_t>(j)]) << p << " " << j;
  }
}

TEST(Dropout, SeedsInMemoryAndSequences) {
  const std::int64_t seed[] = {-7, 1234567890123456789};
  const std::int32_t sequences[] = {5, 9};
  Dropout dropout{.on = true, .first_head = 32, .seeds = 2, .seed = seed, .sequences = sequences};
  const auto is_key = [&](std::uint64_t a, std::uint64_t b) {
    const PhiloxKey found = dropout.key(), wanted = dropout_key(a, b);
    return found.low == wanted.low && found.high == wanted.high;
  };
  EXPECT_TRUE(is_key(static_cast<std::uint64_t>(std::int64_t{-7}), 1234567890123456789u));
  dropout.seeds = 1;
  EXPECT_TRUE(is_key(static_cast<std::uint64_t>(std::int64_t{-7}), 0));
  EXPECT_EQ(dropout.row({}, 1, 3, -2).sequence, 9u);
  EXPECT_EQ(dropout.row({}, 1, 3, -2).head, 35u);
  EXPECT_EQ(dropout.row({}, 1, 3, -2).row, 0xfffffffeu);
  dropout.sequences = nullptr;
  EXPECT_EQ(dropout.row({}, 1, 3, -2).sequence, 1u);
}

TEST(Dropout, Thresholds) {
  EXPECT_EQ(dropout_threshold(0.0), 0u);
  EXPECT_EQ(dropout_threshold(0.5), 0x80000000u);
  EXPECT_EQ(dropout_threshold(0x1p-32), 1u);
  EXPECT_EQ(dropout_threshold(0x1.8p-32), 1u);
  EXPECT_EQ(dropout_threshold(std::nextafter(1.0, 0.0)), 0xffffffffu);
}

/// How often rows of bits that should be independent are alike, in standard deviations.
struct Counts {
  std::int64_t kept = 0, all = 0;
  double off(double chance) const {
    const auto n = static_cast<double>(all);
    return (static_cast<double>(kept) - n * chance) / std::sqrt(n * chance * (1 - chance));
  }
};

/// Every neighbour in seed, offset, sequence, head, row or key has a mask of its own: two decisions
/// agree as often as independent ones do.
TEST(Dropout, RatesAndIndependence) {
  constexpr double kLimit = 4.5;  // standard deviations; two-sided 7e-6 for each of 36
  constexpr int kRows = 200, kKeys = 1000;
  for (const double p : {0.1, 0.5, 0.9}) {
    const std::uint32_t threshold = dropout_threshold(p);
    struct At {
      std::uint64_t seed = 42, offset = 7;
      std::uint32_t sequence = 3, head = 5;
    };
    const auto kept = [&](const At& at, std::uint32_t row, std::int64_t key) {
      return DropoutRow{dropout_key(at.seed, at.offset), at.sequence, at.head, row}.one(key) >=
             threshold;
    };
    Counts rate;
    for (std::uint32_t i = 0; i < kRows; ++i)
      for (std::int64_t j = 0; j < kKeys; ++j) {
        rate.kept += kept({}, i, j) ? 1 : 0;
        ++rate.all;
      }
    EXPECT_LT(std::abs(rate.off(1 - p)), kLimit) << p;
    const double alike = p * p + (1 - p) * (1 - p);
    const auto expect_apart = [&](const std::string& what, const At& other, std::uint32_t rows,
                                  std::int64_t keys) {
      Counts same;
      for (std::uint32_t i = 0; i < kRows; ++i)
        for (std::int64_t j = 0; j < kKeys; ++j) {
          same.kept += kept({}, i, j) == kept(other, i + rows, j + keys) ? 1 : 0;
          ++same.all;
        }
      EXPECT_LT(std::abs(same.off(alike)), kLimit) << what << " " << p;
    };
    expect_apart("seed", {.seed = 43}, 0, 0);
    expect_apart("offset", {.offset = 8}, 0, 0);
    expect_apart("seed for offset", {.seed = 7, .offset = 42}, 0, 0);
    expect_apart("sequence", {.sequence = 4}, 0, 0);
    expect_apart("head", {.head = 6}, 0, 0);
    expect_apart("row", {}, 1, 0);
    for (const std::int64_t keys : {1, 2, 3, 4, 128})
      expect_apart("key + " + std::to_string(keys), {}, 0, keys);
  }
}

/// The words of whole rows have as many ones in each bit as zeros.
TEST(Dropout, EachBitIsEven) {
  Counts ones[32];
  for (std::uint32_t row = 0; row < 50; ++row)
    for (std::int64_t block = 0; block < 250; ++block) {
      const PhiloxWords words = DropoutRow{dropout_key(1, 0), 0, 0, row}.four(block);
      for (const std::uint32_t word : words.word)
        for (int bit = 0; bit < 32; ++bit) {
          ones[bit].kept += word >> bit & 1;
          ++ones[bit].all;
        }
    }
  for (const Counts& bit : ones) EXPECT_LT(std::abs(bit.off(0.5)), 4.5);
}

}  // namespace
}  // namespace longspan::kernels
