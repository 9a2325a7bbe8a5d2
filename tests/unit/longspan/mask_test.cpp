// A mask against its definition, key by key.
#include "longspan/mask.hpp"

#include <gtest/gtest.h>

#include "longspan/score.hpp"
#include "tests/support/sees.hpp"

namespace longspan {
namespace {

TEST(Mask, IntervalIsWhatTheDefinitionSays) {
  for (bool causal : {false, true})
    for (std::int64_t window : {0, 1, 3, 100})
      for (std::int64_t right : {-1, 0, 2})
        for (std::int64_t kv_len : {0, 1, 9})
          for (std::int64_t i = -5; i < 15; ++i)
            for (std::int64_t j = -1; j < 12; ++j) {
              const Mask mask{causal, window, right};
              EXPECT_EQ(mask.visible(i, kv_len).contains(j), tests::sees(mask, i, j, kv_len))
                  << "causal " << causal << " window " << window << " right " << right << " i " << i
                  << " j " << j << " of " << kv_len;
            }
}

TEST(Mask, ChunksAreWhatTheDefinitionSays) {
  for (const bool causal : {false, true})
    for (const std::int64_t chunk : {1, 3, 4, 20})
      for (const std::int64_t lookback : {0, 1, 3, 2147483647})
        for (const std::int64_t window : {0, 5})
          for (const std::int64_t first : {0, 2})
            for (std::int64_t i = -5; i < 15; ++i)
              for (std::int64_t j = first; j < 12; ++j) {
                const Mask mask{
                    .causal = causal, .window = window, .chunk = chunk, .lookback = lookback};
                EXPECT_EQ(mask.visible(i, 11, first).contains(j),
                          tests::sees(mask, i, j, 11, first))
                    << "causal " << causal << " chunk " << chunk << " lookback " << lookback
                    << " window " << window << " first " << first << " i " << i << " j " << j;
              }
}

TEST(Mask, TheRangeOfAPosition) {
  const std::int64_t bounds[] = {2, 4, 4, 4, 4, 7, 9, 9};
  const Ranges ranges{bounds, 4};
  for (std::int64_t i = -1; i < 12; ++i) {
    const Interval found = ranges.around(i);
    for (std::int64_t j = -1; j < 12; ++j)
      EXPECT_EQ(found.contains(j), tests::in_one_range(bounds, i, j)) << i << " " << j;
  }
  EXPECT_TRUE((Ranges{bounds, 0}.around(3).empty()));
}

TEST(Mask, RowsBeforeTheFirstKeySeeNothingUnderCausal) {
  EXPECT_TRUE((Mask{.causal = true}.visible(-1, 10).empty()));
  EXPECT_FALSE((Mask{}.visible(-1, 10).empty()));
}

TEST(Score, SoftcapIsBoundedAndDoesNotOverflow) {
  const Score capped{1.0f, 50.0f};
  for (float s : {0.0f, 1.0f, -30.0f, 5000.0f, -1e30f}) {
    const double expected = 50.0 * std::tanh(s / 50.0) / std::log(2.0);
    EXPECT_NEAR(capped(s), expected, 1e-5 * std::fabs(expected) + 1e-6);
  }
}

TEST(Score, PlainIsTheScaleInBaseTwo) {
  EXPECT_NEAR((Score{0.125f, 0.0f}(3.0f)), 3.0 * 0.125 / std::log(2.0), 1e-6);
}

}  // namespace
}  // namespace longspan
