// Checks the arrays of a request before a kernel follows them. There is one definition, which the
// host runs with one thread and CUDA with a block for each sequence.
//
//     fault        where     column                value
//     query_start  entry     0                     the entry
//     apart        entry     rows of a sequence    the entry
//     kv_len       sequence  0                     the entry
//     too_long     sequence  keys that fit         keys on this rank, or of all if they exceed
//                                                  max_kv_len
//     page         sequence  column of the table   the entry
//     slot         token     0                     the slot
//     overlap      token     0                     the slot
//     query_len    sequence  max_query_len         query tokens
//     qq_width     sequence  width of the bias     query tokens
//     segments     sequence  keys that fit         keys on this rank
//     too_many     0         max_total_keys        keys of all sequences
//     rope         sequence  positions in tables   positions needed
#pragma once

#include <cstdint>

#include "kernels/batch_rows.hpp"
#include "kernels/params.hpp"
#include "kernels/visible.hpp"

namespace longspan::kernels {

/// One thread's share of a request's checks: items `lane`, `lane` + `lanes`, ...
struct Lane {
  std::int64_t lane = 0;
  std::int64_t lanes = 1;
};

/// Whether the sequence's rows are rows of the request. Otherwise nothing else of it may be read.
template <class Report>
LONGSPAN_HD bool check_rows(const Geometry& p, int b, const Report& report) {
  const std::int32_t* start = p.batch.query_start;
  if (start == nullptr) return true;
  if (b == 0 && start[0] != 0) {
    report(Fault::query_start, 0, 0, start[0]);
    return false;
  }
  if (start[b + 1] < start[b] || start[b + 1] > p.tokens || start[b] < 0) {
    report(Fault::query_start, b + 1, 0, start[b + 1]);
    return false;
  }
  return true;
}

/// Checks the padding of a sequence of `kv_len` keys, and how many of its `rows` are used; returns
/// whether they can be followed.
template <class Report>
LONGSPAN_HD bool check_used(const Batch& batch, int b, std::int64_t rows, std::int64_t kv_len,
                            const Report& report) {
  const std::int64_t padding = batch.padding(b), used = batch.used_rows ? batch.used_rows[b] : 0;
  if (padding < 0 || padding > kv_len)
    report(Fault::padding, b, kv_len, padding);
  else if (used < 0 || used > rows)
    report(Fault::used_rows, b, rows, used);
  else
    return true;
  return false;
}

/// An interval that holds the local keys of the sequence that some row of it sees.
LONGSPAN_HD inline Interval needed_keys(const Geometry& p, int b) {
  const Shard shard = p.shard.for_sequence(b);
  const std::int64_t q_len = p.batch.query_len(b, p.tokens), kv_len = p.batch.keys(b, p.shard);
  if (q_len == 0 || p.batch.skips(q_len)) return {};
  if (shard.layout == Layout::listed) return {0, shard.local_len(kv_len)};
  const MaskRule rule = p.mask_rule(b, kv_len);
  const auto row_keys = [&](std::int64_t row) { return rule(p.query_position(b, row, kv_len)); };
  const Interval seen = VisibleBlocks(q_len, row_keys, rule.order(false)).hull();
  return {shard.before(seen.begin, kv_len), shard.before(seen.end, kv_len)};
}

/// Checks the entry for a local key; if it is not a page, reports it and returns false.
template <class Report>
LONGSPAN_HD bool check_page(const Pages& pages, int b, std::int64_t column, const Report& report) {
  const std::int64_t page = pages.table[b * pages.row_stride + column * pages.column_stride];
  if (page >= 0 && page < pages.count) return true;
  report(Fault::page, b, column, page);
  return false;
}

/// Checks that a row may go to `slot` of the cache. `claim(slot)` returns whether another row has
/// claimed it before.
template <class Report, class Claim>
LONGSPAN_HD void check_slot(const CheckParams& p, std::int64_t token, std::int64_t slot,
                            const Report& report, const Claim& claim) {
  if (slot < 0) return;  // nowhere
  if (p.slot_count >= 0 && slot >= p.slot_count)
    report(Fault::slot, token, 0, slot);
  else if (p.claimed != nullptr && slot < p.slot_count && claim(slot))
    report(Fault::overlap, token, 0, slot);
}

/// Checks the new rows of a sequence, if no slots are given.
template <class Report, class Claim>
LONGSPAN_HD void check_new_rows(const CheckParams& check, int b, Lane own, const Report& report,
                                const Claim& claim) {
  const Geometry& p = check.geometry;
  const std::int64_t q_len = p.batch.query_len(b, p.tokens), first_row = p.batch.first_row(b);
  for (std::int64_t t = own.lane; t < q_len; t += own.lanes) {
    const std::int64_t key = new_key(p.batch, p.shard, b, t, q_len);
    if (key < 0) continue;
    std::int64_t slot = p.batch.first_key(b) + key;
    if (check.pages) {
      if (!check_page(check.pages, b, key / check.pages.size, report)) continue;
      slot = check.pages.page(b, key) * check.pages.size + key % check.pages.size;
    }
    check_slot(check, first_row + t, slot, report, claim);
  }
}

/// Checks the sequences together. One thread does it.
template <class Report>
LONGSPAN_HD void check_all_sequences(const CheckParams& check, const Report& report) {
  if (check.most_keys == 0) return;
  const Geometry& p = check.geometry;
  std::int64_t total = 0;
  for (int b = 0; b < p.batch.size; ++b) {
    const std::int64_t keys = p.batch.keys(b, p.shard);
    if (keys > 0) total += keys;
  }
  if (total > check.most_keys) report(Fault::too_many, 0, check.most_keys, total);
}

/// Checks everything about sequence b except given slots. Every lane may report the same fault.
template <class Report, class Claim>
LONGSPAN_HD void check_sequence(const CheckParams& check, int b, Lane own, const Report& report,
                                const Claim& claim) {
  const Geometry& p = check.geometry;
  if (!check_rows(p, b, report)) return;
  if (check.sequence_rows > 0 && p.batch.first_row(b) != b * check.sequence_rows)
    return report(Fault::apart, b, check.sequence_rows, p.batch.first_row(b));
  if (check.is_append && check.slots != nullptr) return;  // nothing else is followed
  const std::int64_t q_len = p.batch.query_len(b, p.tokens), kv_len = p.batch.keys(b, p.shard);
  if (kv_len < 0) return report(Fault::kv_len, b, 0, kv_len);
  if (!check_used(p.batch, b, p.whole_query_len(b), kv_len, report)) return;
  if (p.max_query_len > 0 && q_len > p.max_query_len)
    return report(Fault::query_len, b, p.max_query_len, q_len);
  if (p.bias.qq && p.whole_query_len(b) > p.bias.qq.width)
    return report(Fault::qq_width, b, p.bias.qq.width, p.whole_query_len(b));
  if (p.max_kv_len > 0 && kv_len > p.max_kv_len)
    return report(Fault::too_long, b, p.max_kv_len, kv_len);
  if (check.rope_positions > 0) {
    const std::int64_t needed =
        farthest_position(p.first_position(b, kv_len), p.used_query_len(b)) + 1;
    if (needed > check.rope_positions) return report(Fault::rope, b, check.rope_positions, needed);
  }
  if (check.parts && check.parts.keys > 0) {
    const std::int64_t local_len = p.shard.for_sequence(b).local_len(kv_len);
    if (check.parts.keys < local_len && check.parts.keys * check.parts.count < local_len)
      return report(Fault::segments, b, check.parts.keys * check.parts.count, local_len);
  }
  if (!check.pages && check.slot_count >= 0) {
    const std::int64_t end = p.batch.first_key(b) + p.shard.for_sequence(b).local_len(kv_len);
    if (end > check.slot_count)
      return report(Fault::too_long, b, check.slot_count - p.batch.first_key(b),
                    end - p.batch.first_key(b));
  }
  if (check.pages) {
    const std::int64_t local_len = p.shard.for_sequence(b).local_len(kv_len);
    const std::int64_t capacity = check.pages.columns * check.pages.size;
    if (local_len > capacity) return report(Fault::too_long, b, capacity, local_len);
  }
  if (check.is_append) return check_new_rows(check, b, own, report, claim);
  if (!check.pages) return;
  const Interval keys = needed_keys(p, b);
  if (keys.empty()) return;
  const std::int64_t end = (keys.end - 1) / check.pages.size + 1;
  for (std::int64_t column = keys.begin / check.pages.size + own.lane; column < end;
       column += own.lanes)
    check_page(check.pages, b, column, report);
}

}  // namespace longspan::kernels
