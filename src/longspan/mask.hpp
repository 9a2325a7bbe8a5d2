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
///   0 <= j < kv_len,   causal: j <= i,   window w > 0: i - j < w,   right r >= 0: j - i <= r,
///   chunk c > 0: 0 <= i / c - j / c <= lookback, of whole numbers.
/// The first `prefix` keys need not obey the bounds on the left: window and lookback. Bidirectional
/// ranges (AttentionArgs) let it see more. The alignment says which positions the rows have.
/// Everything that depends on a row's position follows it: mask, ALiBi, qq_bias and RoPE.
struct Mask {
  bool causal = false;        ///< no key after the query's own position
  std::int64_t window = 0;    ///< keys to the left, the query's own included; 0: no bound. In the
                              ///< usual (left, right) notation, left = window - 1.
  std::int64_t right = -1;    ///< keys to the right; -1: no bound. Causal overrides it.
  std::int64_t chunk = 0;     ///< keys of a chunk, counted from the first key behind the padding: a
                              ///< query sees its own chunk, and `lookback` ones before it, as in
                              ///< Llama 4. If not causal, up to the end of its chunk. 0: off
  std::int64_t lookback = 0;  ///< chunks before its own that a query sees
  std::int64_t prefix = 0;    ///< first keys of a sequence that window and chunks do not hide: the
                              ///< most of any sequence (AttentionArgs::prefix_len)
  bool clamp_ranges = false;  ///< bidirectional ranges do not reach past the window, or the chunks,
                              ///< to the left, as in Gemma 4
  Alignment alignment = Alignment::lower_right;  ///< the positions of the query rows

  /// The position of the first of a sequence's `rows` query rows.
  LONGSPAN_HD std::int64_t first_row(std::int64_t rows, std::int64_t kv_len) const {
    return alignment == Alignment::upper_left ? 0 : kv_len - rows;
  }

  /// The chunks of a position, counted from the key `first`: its own and those it looks back to.
  LONGSPAN_HD Interval chunks_of(std::int64_t position, std::int64_t first = 0) const {
    if (position < first) return {first, first};
    // Sequences have fewer than 2^31 keys, and GPUs divide 32 bits sooner.
    const std::uint32_t number =
        static_cast<std::uint32_t>(position - first) / static_cast<std::uint32_t>(chunk);
    const std::int64_t begin = (number - lookback) * chunk;
    return {first + (begin > 0 ? begin : 0), first + (std::int64_t{number} + 1) * chunk};
  }

  /// The keys that a query at `position` sees of a sequence of `kv_len` keys, of which the first
  /// behind the padding is `first`.
  LONGSPAN_HD Interval visible(std::int64_t position, std::int64_t kv_len,
                               std::int64_t first = 0) const {
    Interval keys{0, kv_len};
    if (window > 0 && position - window + 1 > 0)
      keys.begin = position - window + 1 < kv_len ? position - window + 1 : kv_len;
    if (causal) {
      if (position + 1 < keys.end) keys.end = position + 1;
    } else if (right >= 0 && position + right + 1 < keys.end) {
      keys.end = position + right + 1;
    }
    if (chunk > 0) {
      const Interval seen = chunks_of(position, first);
      if (seen.begin > keys.begin) keys.begin = seen.begin < kv_len ? seen.begin : kv_len;
      if (seen.end < keys.end) keys.end = seen.end;
    }
    return keys;
  }

  /// Whether a row may see two intervals: the prefix, and another that does not hold all of it.
  LONGSPAN_HD bool sees_prefix_apart() const { return prefix > 0 && (window > 0 || chunk > 0); }

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

/// Ranges of a sequence whose tokens see each other, besides what the mask lets them see: the
/// tokens of an image, or a prefix. Range r has the positions [bound[2 r], bound[2 r + 1]).
struct Ranges {
  const std::int64_t* bound = nullptr;  ///< [count, 2], ascending, without overlap; null: none
  std::int64_t count = 0;               ///< number of ranges; some may be empty
  std::int64_t stride = 0;              ///< from the ranges of a sequence to those of the next

  /// Whether a table was given.
  LONGSPAN_HD explicit operator bool() const { return bound != nullptr; }

  /// Those of sequence b of a batch.
  LONGSPAN_HD Ranges for_sequence(int b) const {
    return {bound == nullptr ? nullptr : bound + b * stride, count, stride};
  }

  /// The range of a position; an empty interval if it is in none.
  LONGSPAN_HD Interval around(std::int64_t position) const {
    if (count == 0) return {position, position};
    const std::int64_t* const bounds = bound;
    const std::int64_t own =
        last_start(count, position, [bounds](std::int64_t r) { return bounds[2 * r]; });
    const Interval range{bound[2 * own], bound[2 * own + 1]};
    return range.contains(position) ? range : Interval{position, position};
  }
};

}  // namespace longspan
