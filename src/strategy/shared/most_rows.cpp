#include "src/strategy/shared/most_rows.hpp"

#include <algorithm>

#include "src/base/divided_up.hpp"

namespace longspan {

/// No rank has more than an even share of each sequence plus the unevenness of the rule: one row of
/// a striped layout, two of zigzag, a block, or segments of 128 (one for the cut between ranks and
/// one for the end of the sequence).
std::int64_t most_rows_of_a_rank(const Sharding& rule, std::int64_t rows, std::int64_t sequences,
                                 int ranks) {
  std::int64_t uneven = 0;
  switch (rule.layout) {
    case Layout::striped:
      uneven = 1;
      break;
    case Layout::zigzag:
      uneven = 2;
      break;
    case Layout::interleaved:
      uneven = rule.block;
      break;
    case Layout::contiguous:
      uneven = std::int64_t{2} * kSegment;
      break;
    default:
      return rows;
  }
  if (uneven >= rows || sequences > rows / (uneven + 1)) return rows;  // and no product overflows
  return std::min(rows, rows / ranks + sequences * (uneven + 1));
}

std::int64_t most_keys(const Limits& limits, std::int64_t batch) {
  const std::int64_t each = batch * limits.max_kv_len;
  return limits.max_total_keys == 0 ? each : std::min(each, limits.max_total_keys);
}

std::int64_t most_keys_of_a_rank(const Sharding& rule, std::int64_t keys, int ranks) {
  const auto most = [&]() -> std::int64_t {
    switch (rule.layout) {
      case Layout::contiguous:
        return divided_up(segments_of(keys), ranks) * kSegment;
      case Layout::zigzag:
        return 2 * divided_up(keys, 2 * std::int64_t{ranks});
      case Layout::striped:
        return divided_up(keys, ranks);
      case Layout::interleaved:
        return divided_up(divided_up(keys, rule.block), ranks) * rule.block;
      default:
        return keys;
    }
  };
  return std::min(most(), keys);
}

double most_keys_of_a_rank(const Sharding& rule, double keys, int ranks) {
  return static_cast<double>(
      most_keys_of_a_rank(rule, static_cast<std::int64_t>(std::min(keys, 1e15)), ranks));
}

std::int64_t most_keys_of_a_rank(const Sharding& rule, const Limits& limits, std::int64_t batch,
                                 int ranks) {
  const std::int64_t each = batch * most_keys_of_a_rank(rule, limits.max_kv_len, ranks);
  if (limits.max_total_keys == 0) return each;
  return std::min(each, most_rows_of_a_rank(rule, limits.max_total_keys, batch, ranks));
}

}  // namespace longspan
