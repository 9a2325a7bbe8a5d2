/// \file
/// Which keys a query sees. Only positions in the sequence decide this, never an index that is
/// local to a rank, a tile or a page. A shard of the keys therefore sees what the whole would.
#pragma once

#include <cstdint>

#include "longspan/starts.hpp"
#include "longspan/types.hpp"

namespace longspan {

/// Positions [begin, end).
struct Interval {
  std::int64_t begin = 0;  ///< the first
  std::int64_t end = 0;    ///< one past the last

  /// Whether a position is in the interval.
  LONGSPAN_HD bool contains(std::int64_t position) const {
    return position >= begin && position < end;
  }
  /// Whether it has no positions.
  LONGSPAN_HD bool empty() const { return begin >= end; }
};

/// Which positions of its sequence the query rows have. Row t of q_len rows is counted over all
/// ranks.
enum class Alignment : std::uint8_t {
  lower_right,  ///< the last ones: row t has position kv_len - q_len + t, as in decode and prefill
  upper_left,   ///< the first ones: row t has position t, as PyTorch's is_causal counts
};

/// "lower_right" or "upper_left"; "no alignment" for an invalid number.
constexpr const char* name(Alignment alignment) {
  constexpr const char* names[] = {"lower_right", "upper_left"};
  return alignment <= Alignment::upper_left ? names[static_cast<int>(alignment)] : "no alignment";
}

/// A query at position i of its sequence sees key j iff
///   0 <= j < kv_len,   causal: j <= i,   window w > 0: i - j < w,   right r >= 0: j - i <= r.
/// The alignment says which positions the rows have. Everything that depends on a row's position
/// follows it: mask, ALiBi, qq_bias and RoPE.
struct Mask {
  bool causal = false;      ///< no key after the query's own position
  std::int64_t window = 0;  ///< keys to the left, the query's own included; 0: no bound. In the
                            ///< usual (left, right) notation, left = window - 1.
  std::int64_t right = -1;  ///< keys to the right; -1: no bound. Causal overrides it.
  Alignment alignment = Alignment::lower_right;  ///< the positions of the query rows

  /// The position of the first of a sequence's `rows` query rows.
  LONGSPAN_HD std::int64_t first_row(std::int64_t rows, std::int64_t kv_len) const {
    return alignment == Alignment::upper_left ? 0 : kv_len - rows;
  }

  /// The keys that a query at `position` sees of a sequence of `kv_len` keys.
  LONGSPAN_HD Interval visible(std::int64_t position, std::int64_t kv_len) const {
    Interval keys{0, kv_len};
    if (window > 0 && position - window + 1 > 0)
      keys.begin = position - window + 1 < kv_len ? position - window + 1 : kv_len;
    if (causal) {
      if (position + 1 < keys.end) keys.end = position + 1;
    } else if (right >= 0 && position + right + 1 < keys.end) {
      keys.end = position + right + 1;
    }
    return keys;
  }

  /// Whether all members are equal.
  bool operator==(const Mask&) const = default;
};

/// Documents packed in a sequence: a query sees keys of its own document only. Document d has the
/// positions [start[d], start[d + 1]). Positions outside of all documents see nothing and are not
/// seen.
struct Documents {
  const std::int64_t* start = nullptr;  ///< [count + 1], ascending; null: one document
  std::int64_t count = 0;               ///< number of documents; some may be empty
  std::int64_t stride = 0;              ///< from the starts of a sequence to those of the next

  /// Whether a table was given.
  LONGSPAN_HD explicit operator bool() const { return start != nullptr; }

  /// Those of sequence b of a batch.
  LONGSPAN_HD Documents for_sequence(int b) const {
    return {start == nullptr ? nullptr : start + b * stride, count, stride};
  }

  /// The document of a position; an empty interval if it is in none.
  LONGSPAN_HD Interval around(std::int64_t position) const {
    // Empty intervals are in order too: what the first and the last row see bounds what all rows
    // see.
    if (count == 0) return {0, 0};
    if (position < start[0]) return {start[0], start[0]};
    if (position >= start[count]) return {start[count], start[count]};
    const std::int64_t* const starts = start;
    const std::int64_t own =
        last_start(count, position, [starts](std::int64_t d) { return starts[d]; });
    return {start[own], start[own + 1]};
  }
};

}  // namespace longspan
