// The keys that a row sees by the oracle, against the definition, key by key.
#include "launcher/judge/oracle.hpp"

#include <gtest/gtest.h>

#include <vector>

#include "tests/support/sees.hpp"

namespace longspan::launcher {
namespace {

bool same_document(const std::vector<std::int64_t>& starts, std::int64_t i, std::int64_t j) {
  if (starts.empty()) return true;
  for (std::size_t d = 0; d + 1 < starts.size(); ++d)
    if (starts[d] <= i && i < starts[d + 1]) return starts[d] <= j && j < starts[d + 1];
  return false;
}

TEST(Oracle, SeesWhatTheDefinitionSays) {
  const std::vector<std::vector<std::int64_t>> documents{{}, {0, 3, 3, 9}, {2, 4, 7}};
  for (const auto& starts : documents)
    for (const bool causal : {false, true})
      for (const std::int64_t window : {0, 1, 3, 100})
        for (const std::int64_t right : {-1, 0, 2})
          for (const std::int64_t kv_len : {0, 1, 9})
            for (std::int64_t i = -5; i < 15; ++i)
              for (std::int64_t j = -1; j < 12; ++j) {
                const Mask mask{causal, window, right};
                const std::int64_t first = (i + 5) % 3;
                const Interval seen = seen_keys(mask, i, kv_len, starts, first);
                EXPECT_EQ(seen.begin <= j && j < seen.end, j >= first &&
                                                               tests::sees(mask, i, j, kv_len) &&
                                                               same_document(starts, i, j))
                    << "causal " << causal << " window " << window << " right " << right << " i "
                    << i << " j " << j << " of " << kv_len << ", documents " << starts.size();
              }
}

TEST(Oracle, SeesChunksAndRangesAsTheDefinitionSays) {
  const std::vector<std::int64_t> ranges{1, 4, 4, 9};
  for (const bool causal : {false, true})
    for (const std::int64_t window : {0, 2})
      for (const std::int64_t chunk : {0, 1, 3})
        for (const std::int64_t lookback : {0, 1})
          for (const bool clamp : {false, true})
            for (const std::int64_t first : {0, 2})
              for (std::int64_t i = -2; i < 12; ++i)
                for (std::int64_t j = -1; j < 12; ++j) {
                  const Mask mask{.causal = causal,
                                  .window = window,
                                  .chunk = chunk,
                                  .lookback = lookback,
                                  .clamp_ranges = clamp};
                  EXPECT_EQ(seen_keys(mask, i, 10, {}, first, ranges).contains(j),
                            j >= first && tests::sees(mask, i, j, 10, first, ranges))
                      << "causal " << causal << " window " << window << " chunk " << chunk
                      << " lookback " << lookback << " clamp " << clamp << " first " << first
                      << " i " << i << " j " << j;
                }
}

}  // namespace
}  // namespace longspan::launcher
