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
