#include "src/reshard/reshard_plan.hpp"

#include <algorithm>
#include <cstddef>

#include "kernels/consecutive_keys.hpp"

namespace longspan {
namespace {

using kernels::consecutive_keys;
using kernels::KeyRun;

/// The keys that two ranks have in common, for all sequences.
std::vector<KeyRun> runs_between(const ReshardOptions& o, int from, int to) {
  std::vector<KeyRun> runs;
  if (!holds(o.from, from) || !holds(o.to, to)) return runs;
  for (std::size_t b = 0; b < o.lengths.size(); ++b) {
    const int sequence = static_cast<int>(b);
    add_common_runs(shard_of(o.from, from, sequence, o.lengths[b]),
                    shard_of(o.to, to, sequence, o.lengths[b]), o.lengths[b], sequence, runs);
  }
  return runs;
}

/// Adds part d, whose rows begin with `row`; returns the row after it. Runs are cut to the size
/// that one warp takes.
std::int64_t add_part(int d, const std::vector<KeyRun>& runs, bool is_leaving, std::int64_t row,
                      ReshardPlan::Side& side) {
  ReshardPlan::Part part{.first_run = static_cast<std::int64_t>(side.runs.size()),
                         .first_row = row};
  for (const KeyRun& run : runs)
    for (std::int32_t done = 0; done < run.count; done += KeyRun::kMostKeys) {
      KeyRun piece = run;
      piece.count = std::min(run.count - done, KeyRun::kMostKeys);
      piece.from_key = is_leaving ? run.from_key + done : row;
      piece.to_key = is_leaving ? row : run.to_key + done;
      side.runs.push_back(piece);
      row += piece.count;
    }
  part.runs = static_cast<std::int64_t>(side.runs.size()) - part.first_run;
  part.rows = row - part.first_row;
  side.parts[static_cast<std::size_t>(d)] = part;
  return row;
}

ReshardPlan::Side side_of(const ReshardOptions& o, const CacheRanks& cache, int rank, int ranks) {
  ReshardPlan::Side side;
  side.parts.resize(static_cast<std::size_t>(ranks));
  std::int64_t ahead = 0;
  for (std::size_t b = 0; b < o.lengths.size(); ++b) {
    const std::int64_t own =
        holds(cache, rank)
            ? shard_of(cache, rank, static_cast<int>(b), o.lengths[b]).local_len(o.lengths[b])
            : 0;
    side.start.push_back(ahead);
    side.keys.push_back(own);
    ahead += own;
  }
  return side;
}

}  // namespace

bool holds(const CacheRanks& cache, int rank) {
  return rank >= cache.first_rank && rank < cache.first_rank + cache.ranks;
}

Shard shard_of(const CacheRanks& cache, int rank, int sequence, std::int64_t length) {
  return cache.rule.resolve(length, rank - cache.first_rank, cache.ranks, cache.table.data())
      .for_sequence(sequence);
}

void add_common_runs(const Shard& from, const Shard& to, std::int64_t length, std::int32_t sequence,
                     std::vector<KeyRun>& runs) {
  constexpr std::int64_t kMost = std::int64_t{1} << 30;  // keys of a run, counted in 32 bits
  const std::int64_t from_own = from.local_len(length), to_own = to.local_len(length);
  for (std::int64_t position = 0;;) {
    const std::int64_t i = from.before(position, length);  // the next key that `from` holds
    if (i == from_own) return;
    position = from.position(i, length);
    const std::int64_t j = to.before(position, length);  // the next from there that `to` holds
    if (j == to_own) return;
    if (const std::int64_t next = to.position(j, length); next != position) {
      position = next;
      continue;
    }
    const std::int64_t count = std::min({consecutive_keys(from, i, from_own, length),
                                         consecutive_keys(to, j, to_own, length), kMost});
    runs.push_back({i, j, sequence, static_cast<std::int32_t>(count)});
    position += count;
  }
}

ReshardPlan plan_reshard(const ReshardOptions& o, int rank, int ranks) {
  ReshardPlan plan{side_of(o, o.from, rank, ranks), side_of(o, o.to, rank, ranks)};
  std::int64_t row = 0;
  for (int d = 1; d < ranks; ++d)
    row = add_part(d, runs_between(o, rank, (rank + d) % ranks), true, row, plan.leaving);
  const std::vector<KeyRun> kept = runs_between(o, rank, rank);
  add_part(0, kept, true, row, plan.leaving);
  row = add_part(0, kept, false, row, plan.arriving);
  for (int d = 1; d < ranks; ++d)
    row = add_part(d, runs_between(o, (rank - d + ranks) % ranks, rank), false, row, plan.arriving);
  plan.rows = row;
  return plan;
}

}  // namespace longspan
